// Colours code, a line at a time: highlight(language, line, state) gives [pieces, state for the next line].
// A piece is [class, text]; class "" is plain. Every pattern is linear in the line's length.

const MAX_LINE = 2000; // longer lines stay plain

const words = (text) => new Set(text.split(" "));

const C_WORDS = "if else for while do switch case default break continue return struct enum union typedef const static void "
  + "int long short char float double bool unsigned signed sizeof goto extern inline auto class public private protected "
  + "virtual override template typename namespace using new delete this throw try catch true false nullptr NULL null "
  + "final abstract interface extends implements import package instanceof throws super synchronized var record sealed "
  + "string foreach in out ref async await yield where select from get set readonly internal partial operator let fun val "
  + "when object data companion open init func guard protocol extension self nil some any";
const JS_WORDS = "const let var function return if else for while do switch case default break continue new delete typeof "
  + "instanceof in of class extends super this import export from as async await yield try catch finally throw null "
  + "undefined true false void static get set interface type enum implements readonly declare namespace keyof public private";
const PY_WORDS = "def class return if elif else for while in is not and or import from as with try except finally raise "
  + "lambda yield async await pass break continue global nonlocal assert del None True False self match case";
const RUST_WORDS = "fn let mut pub struct enum impl trait for in if else match while loop return use mod crate self Self super "
  + "where as const static ref move async await dyn unsafe type break continue true false extern u8 u16 u32 u64 usize i8 i16 "
  + "i32 i64 isize f32 f64 bool str String Vec Option Result Some None Ok Err";
const GO_WORDS = "package import func var const type struct interface map chan go defer if else for range switch case default "
  + "return break continue fallthrough select nil true false string int int64 float64 bool byte rune error make new len append";
const SH_WORDS = "if then else elif fi for while until do done case esac in function return exit export local set unset echo cd "
  + "source sudo true false";
const SQL_WORDS = "select from where and or not insert into values update set delete create table drop alter join left right inner "
  + "outer full on as group by order having limit offset union all distinct case when then else end null is in like between "
  + "primary key foreign references index view with exists count sum avg min max desc asc default";

const DOUBLE = '"(?:\\\\.|[^"\\\\])*"?';
const SINGLE = "'(?:\\\\.|[^'\\\\])*'?";
const HASH = "#.*";
const SLASHES = "\\/\\/.*";

function language({ keywords = "", comment, strings = [DOUBLE, SINGLE], spans = [], any_case = false, extra }) {
  const parts = [];
  if (comment) parts.push(`(?<com>${comment})`);
  if (extra) parts.push(`(?<key>${extra})`);
  if (strings.length) parts.push(`(?<str>${strings.join("|")})`);
  parts.push("(?<num>\\b\\d[\\w.]*)", "(?<word>[A-Za-z_$][\\w$]*)");
  return { pattern: new RegExp(parts.join("|"), "g"), keywords: words(keywords), spans, any_case };
}

const C_SPANS = [["/*", "*/", "com"]];
const C = language({ keywords: C_WORDS, comment: SLASHES, spans: C_SPANS, extra: "^\\s*#\\w+" });
const JS = language({ keywords: JS_WORDS, comment: SLASHES, spans: [...C_SPANS, ["`", "`", "str"]] });
const PY = language({ keywords: PY_WORDS, comment: HASH, spans: [['"""', '"""', "str"], ["'''", "'''", "str"]], extra: "^\\s*@[\\w.]+" });
const RUST = language({ keywords: RUST_WORDS, comment: SLASHES, strings: [DOUBLE], spans: C_SPANS });
const GO = language({ keywords: GO_WORDS, comment: SLASHES, spans: [...C_SPANS, ["`", "`", "str"]] });
const SH = language({ keywords: SH_WORDS, comment: "(?<=^|\\s)#.*", extra: "\\$\\{?\\w+\\}?|(?<=\\s)--?[a-zA-Z][\\w-]*" });
const SQL = language({ keywords: SQL_WORDS, comment: "--.*", spans: C_SPANS, any_case: true });
const JSON_LANG = language({ keywords: "true false null", strings: [DOUBLE], extra: `${DOUBLE}(?=\\s*:)` });
const YAML = language({ keywords: "true false null yes no on off", comment: "(?<=^|\\s)#.*", extra: "^\\s*-?\\s*[\\w.\\/-]+(?=\\s*[:=])|^\\s*\\[[^\\]]*\\]" });
const HTML = language({ extra: "<\\/?[A-Za-z][\\w-]*|\\/?>", spans: [["<!--", "-->", "com"]] });
const CSS = language({ spans: C_SPANS, extra: "[-\\w]+(?=\\s*:)|@[\\w-]+|[.#][A-Za-z][\\w-]*" });
const RUBY = language({ keywords: PY_WORDS + " end do module require puts nil then unless until begin rescue ensure", comment: HASH });

const LANGUAGES = {
  c: C, cpp: C, "c++": C, h: C, hpp: C, cuda: C, java: C, cs: C, csharp: C, "c#": C, kotlin: C, kt: C, swift: C, scala: C, php: C, dart: C,
  js: JS, javascript: JS, jsx: JS, mjs: JS, ts: JS, typescript: JS, tsx: JS,
  py: PY, python: PY, python3: PY, rs: RUST, rust: RUST, go: GO, golang: GO,
  sh: SH, bash: SH, shell: SH, zsh: SH, console: SH, dockerfile: SH, makefile: SH,
  sql: SQL, json: JSON_LANG, jsonc: JSON_LANG, jsonl: JSON_LANG, yaml: YAML, yml: YAML, toml: YAML, ini: YAML,
  html: HTML, xml: HTML, svg: HTML, css: CSS, scss: CSS, rb: RUBY, ruby: RUBY, r: RUBY, perl: RUBY, lua: language({
    keywords: "local function end if then else elseif for while do repeat until return nil true false and or not in", comment: "--.*" }),
};

export function highlight(name, line, state = null) {
  if (name === "diff") return [[[{ "+": "add", "-": "del", "@": "key" }[line[0]] ?? "", line]], null];
  const rules = LANGUAGES[name];
  if (!rules || line.length > MAX_LINE) return [[["", line]], state];
  const pieces = [];
  let at = 0;
  while (at < line.length) {
    if (state) { // inside a comment or a string that began on an earlier line
      const end = line.indexOf(state.end, at);
      const to = end < 0 ? line.length : end + state.end.length;
      pieces.push([state.kind, line.slice(at, to)]);
      at = to;
      if (end >= 0) state = null;
      continue;
    }
    const span = firstSpan(rules.spans, line, at);
    plain(rules, line.slice(at, span ? span.at : line.length), pieces);
    if (!span) break;
    const [opening, end, kind] = span.span;
    pieces.push([kind, opening]);
    at = span.at + opening.length;
    state = { end, kind };
  }
  return [pieces, state];
}

// Where the next comment or string opens that may reach over lines, unless a line comment begins before it.
function firstSpan(spans, line, at) {
  let found = null;
  for (const span of spans) {
    const idx = line.indexOf(span[0], at);
    if (idx >= 0 && (!found || idx < found.at)) found = { at: idx, span };
  }
  return found;
}

function plain(rules, text, pieces) {
  let last = 0;
  rules.pattern.lastIndex = 0;
  for (const match of text.matchAll(rules.pattern)) {
    const kind = kindOf(rules, match);
    if (!kind) continue;
    if (match.index > last) pieces.push(["", text.slice(last, match.index)]);
    pieces.push([kind, match[0]]);
    last = match.index + match[0].length;
  }
  if (last < text.length) pieces.push(["", text.slice(last)]);
}

function kindOf(rules, match) {
  const { word } = match.groups;
  if (word !== undefined) return rules.keywords.has(rules.any_case ? word.toLowerCase() : word) ? "key" : "";
  for (const kind of ["com", "key", "str", "num"]) if (match.groups[kind] !== undefined) return kind;
  return "";
}
