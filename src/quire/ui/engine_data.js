// Reads one update of /v1/engine/live (docs/live.md) into a model of plain, bounded values: every number is finite,
// every list has an end, every word is short. The parts of the engine view rely on that and check nothing again.

const MAX_ROWS = 128;
const MAX_NODES = 200;
const MAX_POINTS = 240;
const MAX_CELLS = 512;
const MAX_POOLS = 8;
const MAX_ENGINES = 1024;
const HUGE = 1e15;

const object = (x) => (x !== null && typeof x === "object" && !Array.isArray(x) ? x : {});
const list = (x, most) => (Array.isArray(x) ? x.slice(0, most) : []);

// A number that may be missing.
const real = (x) => (typeof x === "number" && Number.isFinite(x) ? Math.max(-HUGE, Math.min(HUGE, x)) : null);
// A number of things: missing ones are none.
const count = (x) => Math.max(0, real(x) ?? 0);
const share = (x) => Math.min(1, count(x));
const counts = (x, most = MAX_POINTS) => (Array.isArray(x) ? x.slice(-most).map(count) : []);

// Words are shown as text, so nothing in them executes; control and direction characters would still move their
// neighbours about, and a long one the whole page.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
function word(x, most = 64) {
  if (typeof x !== "string" && typeof x !== "number" && typeof x !== "boolean") return "";
  const clean = String(x).slice(0, 4 * most).replace(UNSEEN, "");
  return clean.length > most ? `${clean.slice(0, most - 1)}…` : clean;
}

// The values of a table's row, by the names of its columns.
function byColumn(columns, row) {
  const out = {};
  columns.forEach((name, i) => (out[name] = row[i]));
  return out;
}

function readTable(columns, rows, most) {
  const names = list(columns, 32).map((name) => word(name));
  return list(rows, most).filter(Array.isArray).map((row) => byColumn(names, row));
}

const SPANS = new Set(["queue", "prefill", "decode", "preempt", "end"]);

function readSpan(entry) {
  if (!Array.isArray(entry) || !SPANS.has(entry[0])) return null;
  const start = real(entry[1]);
  const end = real(entry[2]);
  if (start === null || end === null) return null;
  return { kind: entry[0], start, end: Math.max(start, end), tokens: count(entry[3]) };
}

const PHASES = new Set(["grammar", "parked", "queued", "prefill", "decode", "preempted", "ended"]);

function readRequest(row, idx) {
  const phase = PHASES.has(row.phase) ? row.phase : "unknown";
  const request = {
    idx, phase, id: word(row.id, 12) || "?",
    prompt: count(row.prompt), cached: count(row.cached), computed: count(row.computed),
    output: count(row.output), maxOutput: count(row.max_output), blocks: count(row.blocks),
    preemptions: count(row.preemptions), arrived: real(row.arrived_s),
    timeline: list(row.timeline, 32).map(readSpan).filter(Boolean),
  };
  request.group = phase === "prefill" || phase === "decode" ? "running" : phase === "ended" ? "ended" : "waiting";
  return request;
}

function readPercentiles(x) {
  const { count: n, p50, p90, p99 } = object(x);
  return { count: count(n), p50: real(p50), p90: real(p90), p99: real(p99) };
}

function readServer(x) {
  const { state, engine, engines, uptime_s, watchers, requests, max_requests, restarts, suspects, latency } = object(x);
  const { count: restarted, recent } = object(restarts);
  const { groups, convicted } = object(suspects);
  const { window_s, ttft_ms, latency_ms, token_ms } = object(latency);
  return {
    state: word(state, 24), engine: count(engine), engines: Math.min(MAX_ENGINES, Math.floor(count(engines))), uptime: count(uptime_s), watchers: count(watchers),
    requests: count(requests), maxRequests: count(max_requests),
    restarts: count(restarted),
    recent: list(recent, 16).map(object).map((r) => ({ ago: count(r.ago_s), cause: word(r.cause, 24), wasReady: r.was_ready === true })),
    suspects: list(groups, 64).map(count), convicted: count(convicted),
    window: count(window_s) || 60,
    ttft: readPercentiles(ttft_ms), latency: readPercentiles(latency_ms), perToken: readPercentiles(token_ms),
  };
}

function readPool(x) {
  const { blocks, free, cached, owned, block_tokens, cell_blocks, refresh_s, cells } = object(x);
  const map = object(cells);
  const cell = Math.max(1, count(cell_blocks));
  const all = count(blocks);
  const cachedIn = list(map.cached, MAX_CELLS).map(count);
  const owner = list(map.owner, MAX_CELLS);
  return {
    blocks: all, free: count(free), cached: count(cached), owned: count(owned),
    blockTokens: list(block_tokens, 8).map(count), cellBlocks: cell, refresh: count(refresh_s),
    cells: list(map.owned, MAX_CELLS).map((o, i) => {
      const size = Math.max(1, Math.min(cell, all - i * cell));
      const owned_ = Math.min(size, count(o));
      return { size, owned: owned_, cached: Math.min(size - owned_, cachedIn[i] ?? 0), owner: real(owner[i]) ?? -1 };
    }),
  };
}

// Parents come before their children; a node whose parent is not there is a root.
function readNodes(columns, rows) {
  const nodes = new Map();
  for (const row of readTable(columns, rows, MAX_NODES)) {
    const id = word(row.id, 24);
    if (id === "" || nodes.has(id)) continue;
    const parent = nodes.get(word(row.parent, 24)) ?? null;
    const node = {
      id, parent, tokens: count(row.tokens), requests: count(row.requests), hits: count(row.hits),
      hitTokens: count(row.hit_tokens), cached: row.cached === 1 || row.cached === true, children: [],
    };
    parent?.children.push(node);
    nodes.set(id, node);
  }
  return [...nodes.values()];
}

function readSpeculation(x) {
  if (x === null || x === undefined || typeof x !== "object") return null;
  const { method, drafts, draft_tokens, accepted, acceptance, recent_acceptance, by_place } = object(x);
  return {
    method: word(method, 24), drafts: count(drafts), draftTokens: count(draft_tokens), accepted: count(accepted),
    acceptance: share(acceptance), recent: real(recent_acceptance) === null ? null : share(recent_acceptance),
    byPlace: counts(by_place, 32),
  };
}

const STARTUP = ["device", "dtype", "attention", "quantization", "kv_dtype", "executor"];

function readStartup(x) {
  const startup = object(x);
  const out = { loadS: real(startup.load_s), allocateS: real(startup.allocate_s) };
  for (const name of STARTUP) out[name] = word(startup[name], 32);
  return { ...out, workers: count(startup.workers), depth: count(startup.pipeline_depth), kvTokens: count(startup.kv_tokens), graphs: count(startup.graphs) };
}

function readCore(x) {
  if (x === null || x === undefined || typeof x !== "object") return null;
  const core = object(x);
  const { counts: n, limits, rates, requests, steps, history, kv, prefix } = core;
  const [num, most, rate, line] = [object(n), object(limits), object(rates), object(requests)];
  const [step, past, tree] = [object(steps), object(history), object(prefix)];
  const leftOut = list(line.left_out, 2);
  return {
    update: count(core.update), watched: count(core.watched_s), now: real(core.now_s) ?? 0,
    running: count(num.running), waiting: count(num.waiting), deferred: count(num.deferred),
    preemptions: count(num.preemptions), prefixQueries: count(num.prefix_queries), prefixHits: count(num.prefix_hits),
    maxRequests: count(most.max_num_seqs), maxStepTokens: count(most.max_num_batched_tokens), maxLength: count(most.max_model_len),
    prefillRate: count(rate.prefill_tokens_s), decodeRate: count(rate.decode_tokens_s), stepRate: count(rate.steps_s),
    requests: readTable(line.columns, line.rows, MAX_ROWS).map(readRequest),
    leftOut: { running: count(leftOut[0]), waiting: count(leftOut[1]) },
    steps: {
      count: count(step.count), prefill: counts(step.prefill), decode: counts(step.decode), rows: counts(step.rows),
      host: counts(step.host_ms), device: counts(step.device_ms),
    },
    history: {
      interval: Math.max(0.05, count(past.interval_s) || 0.5), prefill: counts(past.prefill), decode: counts(past.decode),
      running: counts(past.running), waiting: counts(past.waiting), used: counts(past.used).map(share),
      preemptions: counts(past.preemptions),
    },
    pools: list(object(kv).pools, MAX_POOLS).map(readPool),
    prefix: { enabled: tree.enabled !== false, nodes: readNodes(tree.columns, tree.nodes) },
    speculation: readSpeculation(core.speculation),
    startup: readStartup(core.startup),
  };
}

// null: this is no update.
export function readUpdate(raw) {
  if (raw === null || typeof raw !== "object" || Array.isArray(raw)) return null;
  return { time: real(raw.time_s), coreAge: real(raw.core_age_s), server: readServer(raw.server), core: readCore(raw.core) };
}

// ---- how values are written ----

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });

export const NONE = "–";

export function number(x) {
  if (x === null) return NONE;
  return Math.abs(x) < 1e6 ? whole.format(x) : short.format(x);
}

// Small rates with a decimal, so that they are not all 0.
export const rate = (x) => (x > 0 && x < 10 ? tenth.format(x) : number(x));
export const percent = (x) => (x === null ? NONE : `${x > 0 && x < 0.0995 ? tenth.format(100 * x) : whole.format(100 * x)}\u202f%`);
export const plural = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;

export function millis(x) {
  if (x === null || x < 0) return NONE;
  if (x >= 9995) return seconds(x / 1000);
  if (x >= 1000) return `${(x / 1000).toFixed(2)}\u202fs`;
  return x < 10 ? `${x.toFixed(x === 0 ? 0 : 1)}\u202fms` : `${whole.format(x)}\u202fms`;
}

export function seconds(x) {
  if (x === null || x < 0) return NONE;
  if (x < 1) return millis(x * 1000);
  if (x < 60) return `${x.toFixed(x < 20 ? 1 : 0)}\u202fs`;
  if (x < 3600) return `${Math.floor(x / 60)}\u202fmin ${Math.floor(x % 60)}\u202fs`;
  if (x < 172800) return `${Math.floor(x / 3600)}\u202fh ${Math.floor((x % 3600) / 60)}\u202fmin`;
  return `${number(Math.floor(x / 86400))} days`;
}
