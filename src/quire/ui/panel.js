// The panel of parameters: system prompt, the answer's shape, and every field of params.js with its default.
// Shows the params it is given and calls back with each change; in compare mode it has a tab for each pane.

import { button, byId, h, iconButton } from "./dom.js";
import { BadParameter, GROUPS, SHAPES, noParams, parse } from "./params.js";

export class Panel {
  // actions: {paramsOf(pane), changed(pane, params), close(), compare(on)}
  constructor(element, actions) {
    this.element = element;
    this.actions = actions;
    this.pane = 0;
    this.numPanes = 1;
    this.modelDefaults = {};
    this.opened = new Set(["Sampling"]);
  }

  show(numPanes = this.numPanes) {
    this.numPanes = numPanes;
    this.pane = Math.min(this.pane, numPanes - 1);
    this.params = this.actions.paramsOf(this.pane);
    this.element.replaceChildren(
      h("div", { class: "panel-head" }, h("h2", {}, "Parameters"), iconButton("close", "Close parameters", this.actions.close)),
      ...(numPanes > 1 ? [this.#tabs()] : []),
      h("div", { class: "panel-body" },
        this.#system(), this.#shape(), ...GROUPS.map(([title, fields]) => this.#group(title, fields)),
        h("div", { class: "row" },
          button(numPanes > 1 ? "One pane" : "Compare two", () => this.actions.compare(numPanes === 1), { class: "button small" }),
          button("Reset to defaults", () => { this.#save(noParams()); this.show(); }, { class: "button small" }))));
  }

  // What the model's own files say, by name. Nothing is drawn anew: someone may be typing.
  setDefaults(defaults) {
    this.modelDefaults = defaults;
    for (const [name, value] of Object.entries(defaults)) {
      const input = byId(`param-${name}`);
      if (input && "placeholder" in input) input.placeholder = value;
    }
  }

  #save(params) {
    this.params = params;
    this.actions.changed(this.pane, params);
  }

  #tabs() {
    const tab = (name, idx) => h("button", {
      type: "button", role: "tab", "aria-selected": String(idx === this.pane), class: "tab",
      onclick: () => { this.pane = idx; this.show(); },
    }, name);
    return h("div", { class: "tabs", role: "tablist", "aria-label": "Pane" }, tab("Pane A", 0), tab("Pane B", 1));
  }

  #system() {
    const area = h("textarea", { id: "system", rows: 3, placeholder: "None", dir: "auto", oninput: () => this.#save({ ...this.params, system: area.value }) });
    area.value = this.params.system;
    return h("div", { class: "field" }, h("label", { for: "system" }, "System prompt"), area);
  }

  #shape() {
    const { kind, text } = this.params.shape;
    const choice = h("select", { id: "shape", onchange: () => { this.#save({ ...this.params, shape: { kind: choice.value, text: "" } }); this.show(); } },
      ...Object.entries(SHAPES).map(([name, { label }]) => h("option", { value: name, selected: name === kind }, label)));
    const field = h("div", { class: "field" }, h("label", { for: "shape" }, "Shape of the answer"), choice);
    if (SHAPES[kind].hint) field.append(...this.#shapeText(kind, text));
    return field;
  }

  #shapeText(kind, text) {
    const problem = h("p", { class: "field-problem", role: "alert" });
    const area = h("textarea", {
      rows: 6, class: "mono", spellcheck: false, placeholder: SHAPES[kind].hint, id: "shape-text", "aria-label": SHAPES[kind].label,
      oninput: () => {
        problem.textContent = kind === "schema" ? trouble({ kind: "json", name: "The schema" }, area.value) : "";
        this.#save({ ...this.params, shape: { kind, text: area.value } });
      },
    });
    area.value = text;
    return [area, problem];
  }

  #group(title, fields) {
    const badge = h("span", { class: "badge" });
    const count = () => { // of those that are set
      const numSet = fields.filter(({ name }) => this.params.values[name]?.trim()).length;
      badge.textContent = numSet || "";
      return numSet;
    };
    const isOpen = count() > 0 || this.opened.has(title);
    const box = h("details", { class: "group", open: isOpen, oninput: count, ontoggle: () => (box.open ? this.opened.add(title) : this.opened.delete(title)) },
      h("summary", {}, title, badge), ...fields.map((field) => this.#field(field)));
    return box;
  }

  #field(field) {
    const id = `param-${field.name}`;
    const standard = this.modelDefaults[field.name] ?? field.standard;
    const problem = h("p", { class: "field-problem", role: "alert" });
    const value = this.params.values[field.name] ?? "";
    const oninput = () => {
      problem.textContent = trouble(field, input.value);
      this.#save({ ...this.params, values: { ...this.params.values, [field.name]: input.value } });
    };
    const input = inputFor(field, id, standard, oninput);
    input.value = value;
    if (field.help) input.setAttribute("aria-describedby", `${id}-help`);
    const isWide = field.kind === "json" || field.kind === "lines";
    return h("div", { class: isWide ? "field" : "field narrow" }, h("label", { for: id }, ...breakable(field.label ?? field.name)), input, problem,
      field.help ? h("p", { class: "help", id: `${id}-help` }, field.help) : null);
  }
}

// A name that may be broken where its words end.
const breakable = (name) => name.split("_").flatMap((word, idx) => (idx ? ["_", h("wbr"), word] : [word]));

function inputFor(field, id, standard, oninput) {
  if (field.kind === "boolean") {
    return h("select", { id, onchange: oninput }, h("option", { value: "" }, `default: ${standard}`), h("option", { value: "yes" }, "yes"), h("option", { value: "no" }, "no"));
  }
  if (field.kind === "json" || field.kind === "lines") {
    return h("textarea", { id, rows: field.rows ?? 2, class: "mono", spellcheck: false, placeholder: standard, oninput });
  }
  const mode = { number: "decimal", integer: "numeric" }[field.kind] ?? "text";
  return h("input", { id, type: "text", inputmode: mode, autocomplete: "off", spellcheck: false, placeholder: standard, oninput });
}

function trouble(field, text) {
  try {
    parse(field, text);
    return "";
  } catch (error) {
    if (error instanceof BadParameter) return error.message;
    throw error;
  }
}
