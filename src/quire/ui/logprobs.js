// An answer as its tokens, shaded by how likely each was. Hovering or focusing a token shows what else could have stood
// there. Arrow keys go from token to token.

import { h } from "./dom.js";

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > Math.log(0.01) ? 1 : 2)} %`;
const visible = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "(empty)";

// 0 (certain) to 4 (surprising).
const shade = (logprob) => [-0.1, -0.7, -1.6, -3].filter((limit) => logprob < limit).length;

export function tokenView(logprobs) {
  const box = h("div", { class: "tokens", role: "group", "aria-label": "Tokens of the answer; arrow keys go from one to the next" });
  logprobs.forEach(([token, logprob], idx) => {
    const label = `${visible(token)}, ${percent(logprob)}`;
    const node = h("span", { class: `token t${shade(logprob)}`, tabIndex: idx ? -1 : 0, role: "button", "aria-label": label, "data-idx": String(idx) }, token);
    box.append(node);
    if (token.includes("\n")) box.append(h("br"));
  });
  let shown = null;
  const hide = () => {
    shown?.querySelector(".alternatives")?.remove();
    shown = null;
  };
  const show = (node) => {
    if (node === shown) return;
    hide();
    shown = node;
    const isRight = node.offsetLeft > box.clientWidth / 2;
    node.append(alternatives(logprobs[Number(node.dataset.idx)], isRight));
  };
  const at = (event) => event.target.closest(".token");
  box.addEventListener("pointerover", (event) => at(event) && show(at(event)));
  box.addEventListener("pointerleave", hide);
  box.addEventListener("focusin", (event) => at(event) && show(at(event)));
  box.addEventListener("focusout", hide);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !at(event)) return;
    event.preventDefault();
    const next = box.querySelector(`[data-idx="${Number(at(event).dataset.idx) + step}"]`);
    if (!next) return;
    at(event).tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return box;
}

function alternatives([token, logprob, top], isRight) {
  const rows = top.some(([other]) => other === token) ? top : [[token, logprob], ...top];
  return h("span", { class: isRight ? "alternatives right" : "alternatives", role: "tooltip" },
    ...rows.map(([other, its]) => h("span", { class: other === token ? "alternative chosen" : "alternative" },
      h("bdi", { class: "mono" }, visible(other)),
      h("meter", { min: 0, max: 1, value: Math.exp(its), "aria-hidden": "true" }),
      h("span", { class: "muted" }, percent(its)))));
}
