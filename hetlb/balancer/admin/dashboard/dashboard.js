// The dashboard: what the proxy's admin listener says, once a second over one event stream.
// Nothing is loaded from elsewhere. The token, where one is asked for, stays in this tab's session storage.
"use strict";

import { Scatter, TimeChart, lineClass } from "./charts.js";
import { age, byId, choices, count, difference, make, percent, plural, rate, say, seconds, set } from "./dom.js";

const STORED_TOKEN = "hetlb-admin-token";
const STORED_THEME = "hetlb-theme";
/** A stream that says nothing for this long is taken to be dead; the proxy speaks once a second. */
const SILENCE_MS = 5000;
const RETRY_MS = 1000;
// From the last key of a filter to a stream of what it looks for.
const FILTER_MS = 300;
/** A report of an engine older than this is shown as old. */
const STALE_S = 30;
/** Candidates of a decision shown before one asks for all. */
const CANDIDATES = 12;
const COLOURS = 8;

// --- asking the proxy -----------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const asking = { open: null };

/** The token the operator types; everybody who needs one waits for the same dialog. */
function askToken(wrong) {
  asking.open ??= new Promise((resolve) => {
    const dialog = byId("ask");
    byId("token").value = "";
    say(byId("ask-why"), wrong ? "That was not the token." : "");
    dialog.addEventListener("close", () => {
      asking.open = null;
      const token = byId("token").value.trim();
      byId("token").value = "";
      if (token) sessionStorage.setItem(STORED_TOKEN, token);
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking.open;
}

/** Fetch a path of the admin listener, with the token; asks for it where it is wanted. */
async function ask(path, options = {}) {
  for (;;) {
    const token = sessionStorage.getItem(STORED_TOKEN);
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    // The text of a token may hold what no header can.
    const reply = await fetch(path, { cache: "no-store", ...options, headers });
    if (reply.ok) return reply;
    if (reply.status === 401) {
      sessionStorage.removeItem(STORED_TOKEN);
      await askToken(token !== null);
      continue;
    }
    let message = `status ${reply.status}`;
    try {
      message = (await reply.json()).error.message;
    } catch {
      // Not one of the proxy's own answers: its status has to do.
    }
    throw new Refused(reply.status, message);
  }
}

const tell = (method, path, body) => ask(path, { method, body: body === undefined ? undefined : JSON.stringify(body) });

/** Do what was clicked; what goes wrong is shown and read aloud. */
async function act(what) {
  try {
    await what();
    trouble("");
  } catch (error) {
    trouble(error instanceof Refused ? error.message : `The proxy does not answer: ${error.message}`);
  }
}

function trouble(text) {
  say(byId("trouble"), text);
  byId("trouble").hidden = !text;
}

/** Said to screen readers, and nothing else. */
function announce(text) {
  byId("news").textContent = text;
}

// --- the one event stream -------------------------------------------------------------------------------

const page = { stream: null, snapshot: null, linked: false, partial: false };

function linked(state, text) {
  const link = byId("link");
  set(link, "data-state", state);
  say(link, text);
  document.body.classList.toggle("cut", state === "bad");
}

async function listen() {
  const stream = new AbortController();
  page.stream = stream;
  let watch = null;
  const heard = () => {
    clearTimeout(watch);
    watch = setTimeout(() => stream.abort(), SILENCE_MS);
  };
  try {
    const words = page.snapshot !== null && page.partial ? byId("filter").value.trim() : "";
    const reply = await ask(words ? `v1/events?words=${encodeURIComponent(words)}` : "v1/events", { signal: stream.signal });
    heard();
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let pending = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      heard();
      const events = (pending + value).split("\n\n");
      pending = events.pop();
      // A tab that fell behind shows the newest only.
      const newest = events.findLast((event) => event.startsWith("event: snapshot\ndata: "));
      if (newest !== undefined) shown(JSON.parse(newest.slice(newest.indexOf("data: ") + 6)));
    }
    throw new Error("the stream ended");
  } catch (error) {
    if (page.stream !== stream) return;
    const refused = error instanceof Refused;
    if (page.linked || refused) announce("The connection to the proxy is lost.");
    page.linked = false;
    linked("bad", refused ? "refused" : "no connection");
    if (refused) trouble(error.message);
  } finally {
    clearTimeout(watch);
    stream.abort();
  }
  setTimeout(() => page.stream === stream && listen(), RETRY_MS);
}

function hush() {
  const stream = page.stream;
  page.stream = null;
  stream?.abort();
}

// A hidden page is not looked at: it costs the proxy nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) hush();
  else if (page.stream === null) listen();
});

function shown(snapshot) {
  const before = page.snapshot;
  page.snapshot = snapshot;
  page.partial = partial(snapshot);
  if (!page.linked) {
    page.linked = true;
    linked("good", "live");
    trouble("");
    if (before !== null) announce("The connection to the proxy is back.");
  }
  // A token cannot be sent by following a link.
  byId("links").hidden = sessionStorage.getItem(STORED_TOKEN) !== null;
  say(byId("version"), snapshot.version);
  status(snapshot);
  tiles(snapshot);
  policies(snapshot);
  fleet(snapshot);
  balance(snapshot);
  if (before !== null) news(before, snapshot);
  charts(snapshot);
  decisions(snapshot);
  accuracy(snapshot);
}

/** The instances of a snapshot: of a large fleet the ones in trouble and the busiest, or the ones looked for. */
const everybody = (snapshot) => snapshot.fleet.models.flatMap((model) => model.instances);
/** The sum of a figure over all instances of the fleet. */
const total = (snapshot, figure) => snapshot.fleet.models.reduce((sum, model) => sum + model.totals[figure], 0);
const partial = (snapshot) => snapshot.fleet.models.some((model) => model.instances.length < model.totals.instances);

// --- now ------------------------------------------------------------------------------------------------

// Factor on the times of a profile from which a learnt speed is another one.
const FAR_FACTOR = 1.2;
const COLOUR = { well: "good", busy: "warn", degraded: "bad", down: "bad" };

/** The first line: state, load against capacity, limit, headroom, and what to do. */
function status(snapshot) {
  const { status: now } = snapshot;
  set(byId("status"), "data-state", COLOUR[now.state] ?? "bad");
  const word = now.state[0].toUpperCase() + now.state.slice(1);
  say(byId("status-word"), word);
  say(byId("status-sentence"), now.sentence[0].toUpperCase() + now.sentence.slice(1));
  say(byId("status-advice"), now.advice);
  document.title = now.state === "well" ? "hetlb" : `${word} · hetlb`;
  const list = byId("status-models");
  list.hidden = now.models.length < 2;
  if (list.hidden) return;
  const lines = now.models.map((each) => [each.model, each.state, `${each.sentence}. ${each.advice}`]);
  if (list.dataset.shown === JSON.stringify(lines)) return;
  list.dataset.shown = JSON.stringify(lines);
  list.replaceChildren(...lines.map(([model, state, text]) =>
    make("li", {}, make("span", { class: "pill", "data-state": COLOUR[state], text: `${model} ${state}` }), ` ${text}`)));
}

const TILES = [
  ["up", "Servers"], ["flight", "In flight"], ["queue", "Queue"], ["requests", "Requests"],
  ["failed", "Not answered"], ["tokens", "Output"], ["ttft", "TTFT, median"], ["kv", "KV reserved"],
];
const tileValues = new Map(TILES.map(([name, title]) => {
  const value = make("dd");
  byId("tiles").append(make("div", {}, make("dt", { text: title }), value));
  return [name, value];
}));

/** A figure and, smaller, what belongs to it. */
function tile(name, figure, rest, state = "") {
  const value = tileValues.get(name);
  if (value.dataset.shown === `${figure}|${rest}|${state}`) return;
  value.dataset.shown = `${figure}|${rest}|${state}`;
  set(value, "data-state", state);
  value.replaceChildren(figure, make("small", { text: ` ${rest}` }));
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);

function tiles(snapshot) {
  const all = total(snapshot, "instances");
  const { queue } = snapshot.fleet;
  const { series } = snapshot;
  const lately = (column) => series[column].slice(-5);
  const up = total(snapshot, "able");
  const stuck = snapshot.status.state === "degraded" || snapshot.status.state === "down";
  tile("up", String(up), `of ${all} ready`, up === all ? "" : up && !stuck ? "warn" : "bad");
  tile("flight", count(total(snapshot, "in_flight")), "requests");
  tile("queue", count(queue.requests), queue.requests ? `oldest ${age(queue.oldest_s)}` : "none waiting",
    queue.requests ? (stuck ? "bad" : "warn") : "");
  tile("requests", rate(mean(lately("ok_per_s"))), "/s");
  const failed = mean(lately("not_ok_per_s"));
  tile("failed", rate(failed), "/s", failed > 0 ? "warn" : "");
  tile("tokens", rate(mean(lately("output_tokens_per_s"))), "tokens/s");
  const ttft = lately("ttft_p50_s").filter((value) => value !== null);
  // Against its own last minutes: what is slow for one model is usual for another.
  const usual = snapshot.series.ttft_p50_s.filter((value) => value !== null).sort((a, b) => a - b);
  const ratio = ttft.length && usual.length > 10 ? mean(ttft) / usual[Math.floor(usual.length / 4)] : 1;
  tile("ttft", ttft.length ? seconds(mean(ttft)) : "–", "last 10 s", ratio > 4 ? "bad" : ratio > 2 ? "warn" : "");
  const reserved = total(snapshot, "kv_reserved_tokens");
  const there = total(snapshot, "kv_cache_tokens");
  tile("kv", percent(there ? reserved / there : null), `of ${count(there)}`);
}

function policies(snapshot) {
  const select = byId("policy");
  const inForce = snapshot.fleet.policy;
  choices(select, snapshot.policies, inForce);
  select.disabled = false;
  if (select.dataset.inForce !== inForce) {
    select.dataset.inForce = inForce;
    select.value = inForce;
  }
  byId("policy-set").disabled = select.value === inForce;
}

byId("policy").addEventListener("change", () => policies(page.snapshot));
byId("policy-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = byId("policy").value;
  act(async () => {
    await tell("PUT", "v1/policy", { name });
    announce(`Policy ${name} is in force.`);
  });
});

// --- the fleet ------------------------------------------------------------------------------------------

const HEALTH = { up: "good", suspect: "warn", ejected: "bad" };
const STATES = ["ready", "drain", "maint"];
const STATE_WORDS = { ready: "ready", drain: "draining", maint: "in maintenance" };
/** Tables by model, rows by instance. */
const tables = new Map();

const ORDERS = {
  "": null,
  health: (row) => (row.health !== "up" ? 2 : 0) + (row.state !== "ready" ? 1 : 0),
  workload: (row) => row.workload,
  kv: (row) => Math.max(row.kv_reserved_tokens / row.kv_cache_tokens, row.kv_reported ?? 0),
  in_flight: (row) => row.in_flight,
};

function fleet(snapshot) {
  byId("add").hidden = !snapshot.registration;
  const models = snapshot.fleet.models;
  const names = models.map((model) => model.name);
  if (names.join("\n") !== Array.from(tables.keys()).join("\n")) {
    tables.clear();
    for (const name of names) tables.set(name, new FleetTable(name));
    byId("models").replaceChildren(...Array.from(tables.values(), (table) => table.element));
  }
  const shares = new Map(snapshot.balance.flatMap((each) => each.instances).map((each) => [each.name, each]));
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let visible = 0;
  for (const model of models) {
    visible += tables.get(model.name).update(model, words, snapshot.fleet.queue.models[model.name] ?? 0, shares);
  }
  const all = total(snapshot, "instances");
  byId("shown").hidden = !words.length && !page.partial;
  const which = page.partial && !words.length ? ": the ones in trouble and the busiest; the filter finds the others" : "";
  say(byId("shown"), words.length || page.partial ? `${visible} of ${plural(all, "instance")} shown${which}` : "");
}

class FleetTable {
  #rows = new Map();
  #body = make("tbody");
  #name;
  #summary = make("span", { class: "soft" });

  constructor(model) {
    this.#name = model;
    const columns = [
      ["Server", "left"], ["Health", "left"], ["In flight", "", "dispatched and not ended"],
      ["Slots", "left", "sequences that it is believed to run at once, and where that figure is from"],
      ["Runs", "wide", "running, as the engine reports"], ["Waits", "wide", "waiting, as the engine reports"],
      ["KV cache", "left", "reserved and reported share of the tokens there are"],
      ["Work", "wide", "assigned and not completed"],
      ["Share", "", "of the work of the last minute, and of the speed of those that take requests"],
      ["Speed", "left", "where its speed is from; seen against expected by the profile: prefill, mixed and decode steps"],
      ["Report", "wide", "age of the engine's last report"], ["State", "left"],
    ];
    this.element = make("div", { class: "model" },
      make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Instances of ${model || "all models"}` },
        make("table", {},
          make("caption", {}, make("b", { text: model || "(no model known yet)" }), " ", this.#summary),
          make("thead", {}, make("tr", {}, ...columns.map(([text, kind, title]) =>
            make("th", { scope: "col", class: kind || null, title, text })))),
          this.#body)));
  }

  /** Returns how many instances are shown. */
  update(model, words, queued, shares) {
    const { up, instances: all, ready } = model.totals;
    const out = all - ready;
    say(this.#summary, `${up} of ${all} up, ${out ? `${out} taken out, ` : ""}${queued ? `${count(queued)} waiting` : "none waiting"}`);
    const names = new Set(model.instances.map((row) => row.name));
    for (const [name, row] of this.#rows) {
      if (!names.has(name)) {
        row.element.remove();
        this.#rows.delete(name);
      }
    }
    const key = ORDERS[byId("order").value];
    const sorted = key ? model.instances.toSorted((a, b) => key(b) - key(a)) : model.instances;
    let visible = 0;
    let at = this.#body.firstElementChild;
    for (const instance of sorted) {
      let row = this.#rows.get(instance.name);
      if (row === undefined) {
        row = new FleetRow(instance, this.#name);
        this.#rows.set(instance.name, row);
      }
      row.update(instance, shares.get(instance.name));
      const text = `${instance.name} ${instance.health} ${instance.state} ${instance.url}`.toLowerCase();
      const wanted = words.every((word) => text.includes(word));
      row.element.hidden = !wanted;
      visible += wanted;
      // Moved only where it stands elsewhere, and never under the focus, which a move would take away.
      if (row.element === at) at = at.nextElementSibling;
      else if (!row.element.contains(document.activeElement)) this.#body.insertBefore(row.element, at);
    }
    return visible;
  }
}

/** By how much seen times differ from the profile's: prefill, mixed, decode. */
function modelFactors(factors) {
  const parts = ["prefill", "mixed", "decode"].map((part) => factors?.[part] ?? null);
  if (parts.every((each) => each === null)) return "";
  return parts.map((each) => each === null ? "-" : `${each >= 1 ? "+" : ""}${((each - 1) * 100).toFixed(0)} %`).join(" / ");
}

class FleetRow {
  #cells;
  #pill = make("span", { class: "pill" });
  #why = make("span", { class: "why" });
  #reserved = make("i");
  #reported = make("i");
  #track;
  #figures = make("span", { class: "number" });
  #slots = make("span", { class: "number" });
  #busy = make("i");
  #busyTrack;
  #slotsFrom = make("span", { class: "from" });
  #speedFrom = make("span", { class: "from" });
  #factors = make("span", { class: "soft factors" });
  #remove;
  #buttons;

  constructor(instance, model) {
    this.#track = make("span", { class: "track", "aria-hidden": "true" }, this.#reserved, this.#reported);
    this.#busyTrack = make("span", { class: "track slots", "aria-hidden": "true" }, this.#busy);
    this.#remove = make("button", {
      type: "button", class: "remove", hidden: true, text: "Remove", "aria-label": `Remove ${instance.name}`,
      on: { click: () => removeServer(instance.name) },
    });
    this.#buttons = STATES.map((state) => make("button", {
      type: "button", "data-state": state, text: state,
      on: { click: () => this.#switch(instance.name, model, state) },
    }));
    this.#cells = ["In flight", "", ""].map((title) => make("td", { class: title ? null : "more wide", "data-title": title || null }));
    this.slots = make("td", { class: "left", "data-title": "Slots" }, this.#busyTrack, " ", this.#slots, " ", this.#slotsFrom);
    this.workload = make("td", { class: "more wide" });
    this.share = make("td", { "data-title": "Share" });
    this.model = make("td", { class: "more left" }, this.#speedFrom, " ", this.#factors);
    this.age = make("td", { class: "more wide" });
    this.element = make("tr", {},
      make("th", { scope: "row", title: instance.url }, make("span", { text: instance.name }),
        instance.gpu ? make("small", { class: "soft", text: ` ${instance.gpu}` }) : ""),
      make("td", { class: "left health" }, this.#pill, this.#why),
      this.#cells[0], this.slots, this.#cells[1], this.#cells[2],
      make("td", { class: "left kv", "data-title": "KV" }, this.#track, " ", this.#figures),
      this.workload, this.share, this.model, this.age,
      make("td", { class: "left" },
        make("span", { class: "states", role: "group", "aria-label": `State of ${instance.name}` }, ...this.#buttons), " ", this.#remove));
  }

  update(row, share) {
    set(this.element, "data-health", row.health);
    set(this.element, "data-state", row.state);
    set(this.#pill, "data-state", row.sleep ? "warn" : HEALTH[row.health] ?? "warn");
    say(this.#pill, row.sleep ?? row.health);
    const since = row.sleep_s == null ? "" : `for ${row.sleep_s.toFixed(0)} s`;
    const why = row.sleep ? since : row.health === "up" ? row.restraint : row.health_reason;
    say(this.#why, why);
    this.#why.hidden = !why;
    this.#remove.hidden = !page.snapshot.registration;
    const { max_num_seqs: slots, speed } = row.believes;
    say(this.#slots, count(slots.value));
    this.#busy.style.width = `${Math.min(100, (100 * row.in_flight) / slots.value).toFixed(1)}%`;
    set(this.#busyTrack, "data-over", String(row.in_flight > slots.value));
    say(this.#slotsFrom, slots.source);
    set(this.#slotsFrom, "data-source", slots.source);
    say(this.#speedFrom, speed.source);
    set(this.#speedFrom, "data-source", speed.source);
    set(this.#speedFrom, "title", `${rate(speed.value)} weighted tokens/s, ${speed.factor.toFixed(2)} times the time of its profile`
      + `${speed.age_s === null ? "" : `, newest evidence ${age(speed.age_s)} old`}`);
    set(this.#why, "title", why);
    [row.in_flight, row.running, row.waiting].forEach((value, index) => say(this.#cells[index], count(value)));
    const reserved = row.kv_reserved_tokens / row.kv_cache_tokens;
    this.#reserved.style.width = `${Math.min(100, reserved * 100).toFixed(1)}%`;
    this.#reported.style.width = `${Math.min(100, (row.kv_reported ?? 0) * 100).toFixed(1)}%`;
    set(this.#track, "data-over", String(reserved > 1));
    say(this.#figures, `${percent(reserved)} / ${percent(row.kv_reported)}`);
    set(this.#figures, "title", `${count(row.kv_reserved_tokens)} of ${count(row.kv_cache_tokens)} tokens reserved, `
      + `${row.kv_reported === null ? "none" : percent(row.kv_reported)} reported in use`);
    say(this.workload, seconds(row.workload));
    say(this.share, share === undefined ? "–" : `${percent(share.work_share)} / ${percent(share.speed_share)}`);
    // Without a profile there is nothing to compare with: what is learnt goes by what is seen.
    const far = row.profiled && Math.abs(Math.log(speed.factor)) > Math.log(FAR_FACTOR);
    say(this.#factors, speed.source === "measured" ? modelFactors(row.model_factors)
      : far ? `${speed.factor.toFixed(1)} × its profile` : "");
    say(this.age, seconds(row.signal_age_s));
    this.age.classList.toggle("stale", row.signal_age_s === null || row.signal_age_s > STALE_S);
    for (const button of this.#buttons) set(button, "aria-pressed", String(button.dataset.state === row.state));
  }

  #switch(name, model, state) {
    const now = page.snapshot.fleet.models.find((each) => each.name === model);
    const mine = now?.instances.find((row) => row.name === name);
    const others = now !== undefined && now.totals.able > (mine?.state === "ready" && mine.health === "up" ? 1 : 0);
    if (mine === undefined || mine.state === state) return;
    if (state !== "ready" && mine.state === "ready" && !others
      && !confirm(`${name} is the last instance of ${model} that takes requests. Without it they wait and then fail. Go on?`)) return;
    act(async () => {
      await tell("PUT", `v1/fleet/instances/${encodeURIComponent(name)}/state`, { state });
      for (const button of this.#buttons) set(button, "aria-pressed", String(button.dataset.state === state));
    });
  }
}

/** Take a server out of the fleet, after a question. */
function removeServer(name) {
  if (!confirm(`Remove ${name} from the fleet? What it is answering goes on; it gets nothing new. A server of the fleet file comes back with a restart.`)) return;
  act(() => tell("DELETE", `v1/fleet/instances/${encodeURIComponent(name)}`));
}

byId("add").addEventListener("click", () => {
  byId("add-form").reset();
  say(byId("add-why"), "");
  choices(byId("add-model"), page.snapshot.fleet.models.map((model) => model.name));
  byId("adding").showModal();
});
byId("add-cancel").addEventListener("click", () => byId("adding").close());
byId("add-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const server = { url: byId("add-url").value.trim(), model: byId("add-model").value };
  const name = byId("add-name").value.trim();
  if (name) server.name = name;
  try {
    await tell("POST", "v1/fleet/instances", server);
    byId("adding").close();
    announce(`${name || server.url} was added.`);
  } catch (error) {
    say(byId("add-why"), error.message);
  }
});

let looksFor = null;
byId("filter").addEventListener("input", () => {
  if (page.snapshot) fleet(page.snapshot);
  if (!page.partial && looksFor === null) return;
  clearTimeout(looksFor);
  looksFor = setTimeout(() => {
    hush();
    listen();
  }, FILTER_MS);
});
byId("order").addEventListener("change", () => page.snapshot && fleet(page.snapshot));

/** What changed, for those who do not see it. */
function news(before, snapshot) {
  const old = new Map(everybody(before).map((row) => [row.name, row]));
  const changes = [];
  for (const row of everybody(snapshot)) {
    const was = old.get(row.name);
    if (was === undefined) {
      if (!page.partial) changes.push(`${row.name} was added`);
    } else if (was.health !== row.health) changes.push(`${row.name} is ${row.health}: ${row.health_reason}`);
    else if (was.state !== row.state) changes.push(`${row.name} is ${STATE_WORDS[row.state]}`);
    old.delete(row.name);
  }
  if (!page.partial) for (const name of old.keys()) changes.push(`${name} was removed`);
  if (before.fleet.policy !== snapshot.fleet.policy) changes.push(`policy ${snapshot.fleet.policy} is in force`);
  if (changes.length) announce(`${changes.slice(0, 4).join("; ")}${changes.length > 4 ? `; and ${changes.length - 4} more` : ""}.`);
}

// --- balance --------------------------------------------------------------------------------------------

/** What is drawn by instance: title, text of a value, column of the proxy's series. */
const SHARES = [
  ["Output tokens per second, by server", rate, "instances"],
  ["In flight, by server", count, "in_flight"],
  ["KV cache reserved, by server", percent, "kv_reserved"],
];
const shares = { names: "", charts: [] };

/** Names of the servers that have a line of their own: those with most of the last minute's work, chosen anew every half minute. */
function busiest(snapshot) {
  const names = everybody(snapshot).map((row) => row.name);
  if (names.length < COLOURS) return names;
  const stays = shares.chosen?.every((name) => names.includes(name)) && snapshot.clock_s - shares.chosenAt < 30;
  if (!stays) {
    const work = new Map(snapshot.balance.flatMap((each) => each.instances).map((each) => [each.name, each.work_share]));
    const sorted = names.slice().sort((a, b) => (work.get(b) ?? 0) - (work.get(a) ?? 0));
    shares.chosen = sorted.slice(0, COLOURS - 1);
    shares.chosenAt = snapshot.clock_s;
  }
  return shares.chosen;
}

function balance(snapshot) {
  const states = new Map(snapshot.status.models.map((each) => [each.model, each.state]));
  const colour = (model, balanced) => {
    const state = states.get(model);
    if (state === "degraded" || state === "down") return "bad";
    if (balanced) return "good";
    return state === "busy" ? "warn" : "wait";
  };
  const lines = snapshot.balance.map((each) => [each.model, colour(each.model, each.balanced), each.sentence]);
  const list = byId("balance");
  if (list.dataset.shown !== JSON.stringify(lines)) {
    list.dataset.shown = JSON.stringify(lines);
    list.replaceChildren(...lines.map(([model, state, text]) => make("li", {},
      make("span", { class: "pill", "data-state": state, text: model || "all models" }), ` ${text}`)));
  }
  const named = busiest(snapshot);
  if (shares.names !== named.join("\n")) {
    shares.names = named.join("\n");
    shares.charts = SHARES.map(([title, text]) => new TimeChart(title, named.map((name, index) => [name, name, lineClass(index)]), text, text === count));
    byId("shares").replaceChildren(...shares.charts.map((chart) => chart.element));
  }
  const { series } = snapshot;
  shares.charts.forEach((chart, index) => {
    const column = SHARES[index][2];
    const empty = Array(series.ok_per_s.length).fill(column === "instances" ? 0 : null);
    chart.update({ bin_s: series.bin_s, ...Object.fromEntries(named.map((name) => [name, series[column][name] ?? empty])) });
  });
}

// --- the last minutes -----------------------------------------------------------------------------------

const CHARTS = [
  new TimeChart("Requests per second", [["ok_per_s", "ok", "k0"], ["not_ok_per_s", "others", "k1"]], rate),
  new TimeChart("Output tokens per second", [["output_tokens_per_s", "tokens", "k2"]], rate),
  new TimeChart("Time to first token", [["ttft_p50_s", "median", "k0"], ["ttft_p99_s", "p99", "k3 d1"]], seconds),
  new TimeChart("Requests waiting", [["queue", "waiting", "k1"]], count, true),
  new TimeChart("End to end", [["e2e_p50_s", "median", "k0"], ["e2e_p99_s", "p99", "k3 d1"]], seconds),
];
byId("charts").append(...CHARTS.map((chart) => chart.element));

function charts(snapshot) {
  for (const chart of CHARTS) chart.update(snapshot.series);
  const ended = Object.entries(snapshot.series.outcomes).sort((a, b) => b[1] - a[1]);
  say(byId("outcomes"), ended.length
    ? `Ended in this time: ${ended.map(([outcome, number]) => `${count(number)} ${outcome.replaceAll("_", " ")}`).join(", ")}. A request counts, with its tokens, when it ends.`
    : "No request ended in this time. A request counts, with its tokens, when it ends.");
}

// --- the last decisions ---------------------------------------------------------------------------------

const decisionRows = new Map();

function decisions(snapshot) {
  findable(snapshot);
  const { last, total } = snapshot.decisions;
  byId("no-decisions").hidden = last.length > 0 || decisionRows.size > 0;
  byId("decision-table").hidden = !byId("no-decisions").hidden;
  const hold = byId("hold").checked;
  if (!hold) page.shownTotal = total;
  const newer = total - (page.shownTotal ?? total);
  say(byId("held"), hold && newer ? `${plural(newer, "newer decision")} not shown` : "");
  const byLease = new Map(last.map((each) => [each.lease, each]));
  const body = byId("decision-rows");
  if (!hold) {
    for (const [lease, row] of decisionRows) {
      if (!byLease.has(lease)) {
        row.remove();
        decisionRows.delete(lease);
      }
    }
    let at = body.firstElementChild;
    for (const each of last) {
      let row = decisionRows.get(each.lease);
      if (row === undefined) {
        row = new DecisionRow(each);
        decisionRows.set(each.lease, row);
        body.insertBefore(row.element, at);
        body.insertBefore(row.detail, at);
      } else {
        at = row.detail.nextElementSibling;
      }
    }
  }
  for (const [lease, row] of decisionRows) row.update(byLease.get(lease), snapshot.clock_s);
  grouped(last);
}

/** Reason why a decision was not as usual, "" where it was: it failed, was far longer than predicted, or took long. */
function unusual(each, middle) {
  if (each.outcome !== null && each.outcome !== "ok") return each.outcome.replaceAll("_", " ");
  if (each.output_tokens / each.sequences > 3 * each.predicted_output + 32) return "far longer than predicted";
  if (middle > 0 && (each.took_s ?? 0) > 4 * middle) return "took long";
  return "";
}

/** Servers, or reasons, that are named in a sentence. */
const MOST_NAMED = 5;

/** What was usual in a sentence, and what was not in the table alone where that is wanted. */
function grouped(last) {
  const took = last.map((each) => each.took_s).filter((value) => value !== null).sort((a, b) => a - b);
  const middle = took[Math.floor(took.length / 2)] ?? 0;
  const reasons = new Map(last.map((each) => [each.lease, unusual(each, middle)]));
  const tally = (values, others) => {
    const numbers = values.reduce((all, value) => all.set(value, (all.get(value) ?? 0) + 1), new Map());
    const all = Array.from(numbers).sort((a, b) => b[1] - a[1]);
    const more = all.splice(MOST_NAMED).reduce((sum, each) => sum + each[1], 0);
    return [...all, ...(more ? [[others, more]] : [])].map(([value, number]) => `${count(number)} ${value}`).join(", ");
  };
  const usual = last.filter((each) => !reasons.get(each.lease));
  const rest = Array.from(reasons.values()).filter(Boolean);
  say(byId("usual"), last.length ? `Of the last ${last.length}: ${usual.length} normal`
    + `${usual.length ? ` (${tally(usual.map((each) => `to ${each.chosen}`), "to others")})` : ""}, `
    + `${rest.length ? `${rest.length} unusual: ${tally(rest, "others")}.` : "none unusual."}` : "");
  const only = byId("unusual").checked;
  for (const [lease, row] of decisionRows) {
    const reason = reasons.get(lease);
    set(row.element, "data-unusual", String(Boolean(reason)));
    row.element.hidden = only && reason === "";
    if (row.element.hidden) row.detail.hidden = true;
  }
}
byId("unusual").addEventListener("change", () => page.snapshot && grouped(page.snapshot.decisions.last));

class DecisionRow {
  #decision;
  #button;
  #turn = make("span", { class: "turn", "aria-hidden": "true", text: "▸" });
  #age = make("span", { class: "age" });
  #came = make("td");
  #took = make("td");
  #outcome = make("td", { class: "left" });

  constructor(decision) {
    this.#decision = decision;
    const id = `decision-${decision.lease}`;
    this.#button = make("button", {
      type: "button", class: "open", "aria-expanded": "false", "aria-controls": id,
      "aria-label": `Why request ${decision.request_id} went to ${decision.chosen}`,
      on: { click: () => this.#toggle() },
    }, this.#turn, this.#age);
    this.element = make("tr", { class: "decision" },
      make("td", { class: "left" }, this.#button),
      make("th", { scope: "row", class: "left", title: decision.x_request_id, text: String(decision.request_id) }),
      make("td", { class: "left", text: decision.model }),
      make("td", { text: count(decision.prompt_tokens_per_sequence) + (decision.sequences > 1 ? ` × ${decision.sequences}` : "") }),
      make("td", { text: count(decision.predicted_output) }),
      this.#came,
      this.#took,
      this.#outcome,
      make("td", { class: "left" }, make("b", { text: decision.chosen })),
      make("td", { class: "left", text: decision.policy }));
    this.detail = make("tr", { class: "detail", id, hidden: true }, make("td", { colspan: "10" }));
  }

  update(decision, clock) {
    if (decision !== undefined) this.#decision = decision;
    const { dispatched_at_s: at, output_tokens: tokens, sequences, ended } = this.#decision;
    say(this.#age, `${age(clock - at)} ago`);
    const { took_s: took, outcome } = this.#decision;
    say(this.#took, took === null ? `${age(clock - at)} so far` : seconds(took));
    say(this.#outcome, outcome === null ? "running" : outcome.replaceAll("_", " "));
    if (decision !== undefined) say(this.#came, ended ? count(tokens / sequences) : `${count(tokens / sequences)} so far`);
  }

  remove() {
    this.element.remove();
    this.detail.remove();
  }

  async #toggle() {
    const open = this.detail.hidden;
    set(this.#button, "aria-expanded", String(open));
    say(this.#turn, open ? "▾" : "▸");
    this.detail.hidden = !open;
    if (!open) return;
    if (!byId("hold").checked) {
      byId("hold").checked = true;
      announce("The list stays as it is while you read.");
    }
    if (!this.detail.dataset.read) {
      await act(async () => {
        const reply = await ask(`v1/decisions/${this.#decision.lease}`);
        this.detail.firstElementChild.replaceChildren(candidates(await reply.json()));
        this.detail.dataset.read = "true";
      });
    }
  }
}

byId("hold").addEventListener("change", (event) => {
  if (event.target.checked) return;
  for (const row of decisionRows.values()) row.remove();
  decisionRows.clear();
  decisions(page.snapshot);
});

// --- finding decisions ----------------------------------------------------------------------------------

const OUTCOMES = ["", "running", "ok", "upstream_refused", "upstream_busy", "upstream_error", "no_response", "broken_stream", "connect_failed", "client_gone", "shutdown"];
choices(byId("find-outcome"), OUTCOMES);

/** What can be chosen among. */
function findable(snapshot) {
  choices(byId("find-instance"), ["", ...everybody(snapshot).map((row) => row.name)]);
  choices(byId("find-model"), ["", ...snapshot.fleet.models.map((model) => model.name)]);
}

byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const query = new URLSearchParams({ last: "100" });
  for (const [name, id] of [["request_id", "find-request"], ["instance", "find-instance"], ["model", "find-model"],
    ["outcome", "find-outcome"], ["longer_s", "find-longer"]]) {
    const value = byId(id).value.trim();
    if (value) query.set(name, value);
  }
  act(async () => {
    const { decisions: found, clock_s: clock } = await (await ask(`v1/decisions?${query}`)).json();
    byId("hold").checked = true;
    for (const row of decisionRows.values()) row.remove();
    decisionRows.clear();
    for (const each of found.toReversed()) {
      const row = new DecisionRow(each);
      decisionRows.set(each.lease, row);
      byId("decision-rows").append(row.element, row.detail);
      row.update(each, clock);
    }
    page.shownTotal = page.snapshot.decisions.total;
    byId("find-clear").hidden = false;
    byId("no-decisions").hidden = true;
    byId("decision-table").hidden = false;
    say(byId("found"), found.length ? `${plural(found.length, "decision")} found among those that are kept.`
      : "No decision that is kept matches.");
  });
});
byId("find-clear").addEventListener("click", () => {
  byId("find").reset();
  byId("find-clear").hidden = true;
  say(byId("found"), "");
  byId("hold").checked = false;
  byId("hold").dispatchEvent(new Event("change"));
});

/** A number of a score: enough digits to tell two apart. */
const figure = (value) => {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(1);
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
};

/** Every candidate of a decision with its terms, the best first. */
function candidates(decision) {
  const all = decision.candidates;
  const chosen = all.find((each) => each.instance === decision.chosen);
  const rank = (each) => (each === chosen ? 0 : each.eligible && each.score !== null ? 1 : 2);
  const sorted = all.toSorted((a, b) => rank(a) - rank(b) || (a.score ?? Infinity) - (b.score ?? Infinity));
  // Terms that are 0 everywhere are left out; where a policy has none, those of the paper stand.
  const terms = Array.from(new Set(all.flatMap((each) => Object.keys(each.terms ?? {}))))
    .filter((name) => all.some((each) => each.terms?.[name]));
  const weight = (name) => all.find((each) => each.weights?.[name] !== undefined)?.weights[name] ?? 1;
  const weighted = (each, name) => (each.terms?.[name] === undefined ? undefined : each.terms[name] * weight(name));
  // Each term as it counts, so that a row adds up to its score.
  const columns = [
    ...terms.map((name) => [`${weight(name) === 1 ? "" : `${figure(weight(name))} × `}${name.replace(/_s$/, " s").replaceAll("_", " ")}`,
      (each) => figure(weighted(each, name))]),
    ...(terms.length ? [] : [
      ["Batch", (each) => count(each.ideal_batch)],
      ["Processing s", (each) => figure(each.processing_s)],
      ["Work s", (each) => figure(each.workload)],
    ]),
    ["KV reserved", (each) => percent(each.kv_utilization)],
  ].filter(([, cell]) => all.some((each) => cell(each) !== "–"));
  const able = all.filter((each) => each.eligible && each.score !== null).length;
  const why = (each) => {
    if (each === chosen) return able > 1 ? `chosen: the lowest score of ${able}` : "chosen: the only one that could take it";
    if (!each.eligible || each.score === null) return each.reason || "could not take it";
    if (!chosen || chosen.score === null) return each.reason;
    const more = each.score - chosen.score;
    if (more === 0) return "the same score, later in the file";
    const share = chosen.score > 0 ? ` (${difference(each.score, chosen.score)})` : "";
    return `score higher by ${figure(more)}${share}`;
  };
  const body = make("tbody");
  const show = (number) => body.replaceChildren(...sorted.slice(0, number).map((each) =>
    make("tr", { "data-chosen": String(each === chosen), "data-able": String(rank(each) < 2) },
      make("th", { scope: "row", text: each.instance }),
      make("td", { text: figure(each.score) }),
      ...columns.map(([, cell]) => make("td", { text: cell(each) })),
      make("td", { class: "reason", text: why(each) }))));
  show(CANDIDATES);
  const box = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Candidates for request ${decision.request_id}` },
    make("table", {},
      make("caption", { class: "soft", text: `${plural(all.length, "candidate")}, ${able} could take it; the lowest score wins (policy ${decision.policy})${terms.length ? "; the terms, as they are weighted, add up to it" : ""}.` }),
      make("thead", {}, make("tr", {},
        make("th", { scope: "col", text: "Instance" }), make("th", { scope: "col", text: "Score" }),
        ...columns.map(([name]) => make("th", { scope: "col", text: name })),
        make("th", { scope: "col", class: "left", text: "Why" }))),
      body));
  if (sorted.length > CANDIDATES) {
    box.append(make("button", {
      type: "button", text: `Show all ${sorted.length}`,
      on: { click: (event) => { show(sorted.length); event.target.remove(); box.focus(); } },
    }));
  }
  return box;
}

// --- predicted against actual ---------------------------------------------------------------------------

const LENGTHS = new Scatter("Output tokens", count);
const TIMES = new Scatter("Seconds from dispatch to the end", seconds);
byId("scatters").append(LENGTHS.element, TIMES.element);

function accuracy(snapshot) {
  const { instances, points } = snapshot.accuracy;
  // A colour stays with its instance: by its place in the fleet. Beyond the colours there are, all are alike.
  const order = everybody(snapshot).map((row) => row.name);
  const colour = (name) => {
    const place = order.indexOf(name);
    return place >= 0 && place < COLOURS - 1 ? place : COLOURS - 1;
  };
  const colours = instances.map(colour);
  LENGTHS.update(points.map(([index, predicted, actual]) => [colours[index], predicted, actual]));
  TIMES.update(points.map(([index, , , predicted, actual]) => [colours[index], predicted, actual]));
  const named = order.slice(0, COLOURS - 1).filter((name) => instances.includes(name));
  const others = instances.some((name) => colour(name) === COLOURS - 1);
  const shown = [...named, ...(others ? [""] : [])];
  const legend = byId("scatter-legend");
  if (legend.dataset.shown !== JSON.stringify(shown)) {
    legend.dataset.shown = JSON.stringify(shown);
    legend.replaceChildren(...shown.map((name) => make("span", { class: "key" },
      make("i", { class: `k${name ? colour(name) : COLOURS - 1}` }), name || "all others")));
  }
}

// --- the controls of the bar: at the end of the page on a phone, where the state comes first -----------------

const phone = matchMedia("(max-width: 600px)");
const controls = Array.from(document.querySelectorAll(".bar > form, .bar > .right"));
function place() {
  const where = phone.matches ? document.querySelector("footer") : document.querySelector(".bar");
  where.append(...controls);
}
phone.addEventListener("change", place);
place();

// --- colours, and begin ---------------------------------------------------------------------------------

const theme = byId("theme");
theme.value = localStorage.getItem(STORED_THEME) ?? "";
if (theme.selectedIndex < 0) theme.value = "";
function colours() {
  document.documentElement.dataset.theme = theme.value;
  localStorage.setItem(STORED_THEME, theme.value);
}
theme.addEventListener("change", colours);
colours();

if (!document.hidden) listen();
