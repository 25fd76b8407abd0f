// Everything a request can be told about sampling: one table of fields with their defaults, and how what was typed
// becomes fields of a request. params is {system, values: {name: text as typed}, shape: {kind, text}}.

const yesNo = { kind: "boolean" };
const json = { kind: "json" };

// What is not filled in is not sent: the server then uses `standard`, or what the model itself asks for.
export const GROUPS = [
  ["Sampling", [
    { name: "temperature", standard: "1", kind: "number", min: 0, max: 100, help: "0 always takes the likeliest token" },
    { name: "top_p", standard: "1", kind: "number", min: 0, max: 1, help: "of the likeliest tokens, as many as have this probability together" },
    { name: "top_k", standard: "0", kind: "integer", min: -1, help: "of the likeliest tokens, so many; 0: all" },
    { name: "min_p", standard: "0", kind: "number", min: 0, max: 1, help: "no tokens less likely than this share of the likeliest" },
    { name: "presence_penalty", standard: "0", kind: "number", min: -2, max: 2, help: "against tokens that the answer has" },
    { name: "frequency_penalty", standard: "0", kind: "number", min: -2, max: 2, help: "against tokens, by how often the answer has them" },
    { name: "repetition_penalty", standard: "1", kind: "number", min: 0, max: 100, help: "against tokens of prompt and answer; 1: none" },
    { name: "seed", standard: "random", kind: "integer", help: "the same seed gives the same answer" },
  ]],
  ["Length and stopping", [
    { name: "max_tokens", standard: "what fits", kind: "integer", min: 0, help: "length of the answer" },
    { name: "min_tokens", standard: "0", kind: "integer", min: 0 },
    { name: "stop", standard: "none", kind: "lines", help: "texts that end the answer, one per line" },
    { name: "stop_token_ids", standard: "none", kind: "ids", help: "token ids, with blanks between" },
    { name: "include_stop_str_in_output", standard: "no", ...yesNo },
    { name: "ignore_eos", standard: "no", ...yesNo, help: "go on where the model would end" },
    { name: "repetition_detection", standard: "none", ...json, help: '{"max_pattern_size": 8, "min_count": 4}' },
  ]],
  ["Tokens", [
    { name: "logit_bias", standard: "none", ...json, help: '{"token id": -100 to 100}' },
    { name: "bad_words", standard: "none", kind: "lines", help: "never written, one per line" },
    { name: "allowed_token_ids", standard: "all", kind: "ids", help: "token ids, with blanks between" },
    { name: "skip_special_tokens", standard: "yes", ...yesNo },
    { name: "spaces_between_special_tokens", standard: "yes", ...yesNo },
    { name: "top_logprobs", standard: "off", kind: "integer", min: 0, max: 20, help: "alternatives kept for each token: see Tokens under an answer" },
  ]],
  ["Thinking", [
    { name: "reasoning_effort", standard: "the model's", kind: "text", help: "low, medium or high, for models that know it" },
    { name: "thinking_token_budget", standard: "none", kind: "integer", min: -1, help: "tokens after which thinking is closed" },
    { name: "include_reasoning", standard: "yes", ...yesNo },
  ]],
  ["Tools", [
    { name: "tools", standard: "none", ...json, rows: 6, help: "a list of functions, as in OpenAI's API" },
    { name: "tool_choice", standard: "auto", kind: "text", help: "auto, none, required, or a function's name" },
    { name: "parallel_tool_calls", standard: "yes", ...yesNo },
  ]],
  ["Request", [
    { name: "n", standard: "1", kind: "integer", min: 1, max: 16, help: "answers at once, kept as branches" },
    { name: "timeout_s", standard: "the server's", kind: "number", min: 0 },
    { name: "priority", standard: "0", kind: "integer", help: "lower runs earlier, where the server has priorities" },
    { name: "cache_salt", standard: "none", kind: "text", help: "shares cached prompts only with the same salt" },
    { name: "truncate_prompt_tokens", standard: "off", kind: "integer", min: -1, help: "keep so many tokens of the prompt" },
    { name: "truncation_side", standard: "right", kind: "text", help: "left or right" },
    { name: "stream_interval", standard: "1", kind: "integer", min: 1, help: "tokens in one event" },
    { name: "chat_template_kwargs", standard: "none", ...json, help: '{"enable_thinking": false}' },
    { name: "other", label: "other fields", standard: "none", ...json, help: "any other field of the API, as one object" },
  ]],
];

export const SHAPES = {
  none: { label: "Free text" },
  schema: { label: "JSON schema", hint: '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}' },
  json: { label: "Any JSON object" },
  regex: { label: "Regular expression", hint: "[0-9]{4}-[0-9]{2}-[0-9]{2}" },
  choice: { label: "One of these (a line each)", hint: "yes\nno" },
  grammar: { label: "Grammar (GBNF)", hint: 'root ::= "yes" | "no"' },
};

const FIELDS = new Map(GROUPS.flatMap(([, fields]) => fields).map((field) => [field.name, field]));

export const noParams = () => ({ system: "", values: {}, shape: { kind: "none", text: "" } });

// Params from anywhere (a file, an older page): known names, text only.
export function cleanParams(source) {
  const made = noParams();
  if (typeof source?.system === "string") made.system = source.system;
  for (const [name, value] of Object.entries(source?.values ?? {})) {
    if (FIELDS.has(name) && typeof value === "string") made.values[name] = value;
  }
  if (Object.hasOwn(SHAPES, source?.shape?.kind) && typeof source.shape.text === "string") made.shape = { kind: source.shape.kind, text: source.shape.text };
  return made;
}

// What differs from the defaults, in words.
export function summary(params) {
  const given = Object.entries(params.values).filter(([, text]) => text.trim()).map(([name, text]) => `${name} ${text.trim().replace(/\s+/g, " ").slice(0, 24)}`);
  if (params.system.trim()) given.unshift("system prompt");
  if (params.shape.kind !== "none") given.push(SHAPES[params.shape.kind].label);
  return given.join(", ") || "defaults";
}

export class BadParameter extends Error {}

const PARSERS = {
  number: (text, field) => {
    const value = Number(text);
    const { min = -Infinity, max = Infinity, name } = field;
    if (!Number.isFinite(value)) throw new BadParameter(`${name} must be a number.`);
    if (value < min || value > max) throw new BadParameter(`${name} must be ${max === Infinity ? `at least ${min}` : `between ${min} and ${max}`}.`);
    return value;
  },
  integer: (text, field) => {
    if (!/^-?\d{1,15}$/.test(text)) throw new BadParameter(`${field.name} must be a whole number.`);
    return PARSERS.number(text, field);
  },
  boolean: (text) => text === "yes",
  text: (text) => text,
  lines: (text) => text.split("\n").filter(Boolean),
  ids: (text, field) => text.split(/[\s,]+/).filter(Boolean).map((id) => PARSERS.integer(id, field)),
  json: (text, field) => {
    try {
      return JSON.parse(text);
    } catch {
      throw new BadParameter(`${field.label ?? field.name} must be JSON.`);
    }
  },
};

export function parse(field, text) {
  const trimmed = field.kind === "lines" ? text : text.trim();
  return trimmed ? PARSERS[field.kind](trimmed, field) : undefined;
}

// The fields of a request. Throws BadParameter with a sentence for the user.
export function requestFields(params) {
  const fields = {};
  for (const [name, text] of Object.entries(params.values)) {
    const value = FIELDS.has(name) ? parse(FIELDS.get(name), text) : undefined;
    if (value !== undefined) fields[name] = value;
  }
  if (fields.top_logprobs !== undefined) fields.logprobs = true;
  const { tool_choice: choice, other, ...rest } = fields;
  if (choice && rest.tools) rest.tool_choice = ["auto", "none", "required"].includes(choice) ? choice : { type: "function", function: { name: choice } };
  if (other !== undefined && (typeof other !== "object" || Array.isArray(other))) throw new BadParameter("other fields must be a JSON object.");
  return { ...rest, ...shapeFields(params.shape), ...other };
}

function shapeFields({ kind, text }) {
  if (kind === "none") return {};
  if (kind === "json") return { response_format: { type: "json_object" } };
  if (!text.trim()) throw new BadParameter(`Paste the ${SHAPES[kind].label} that answers must follow, or choose free text.`);
  if (kind === "regex") return { structured_outputs: { regex: text.trim() } };
  if (kind === "choice") return { structured_outputs: { choice: text.split("\n").map((line) => line.trim()).filter(Boolean) } };
  if (kind === "grammar") return { structured_outputs: { gbnf: text } };
  const schema = PARSERS.json(text, { name: "The schema" });
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: schema.schema ?? schema } } };
}
