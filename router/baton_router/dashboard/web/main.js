// The page: `Requests` keeps the router's events, and the views draw them.

import { byId, html, say } from "./dom.js";
import { Chart } from "./charts.js";
import { Feed } from "./feed.js";
import { History } from "./history.js";
import { keep, key } from "./key.js";
import { addressOf, labels } from "./names.js";
import { Playground } from "./playground.js";
import { Relay, remarksOf, stateOf } from "./relay.js";
import { count, seconds, share } from "./sizes.js";
import { Requests } from "./state.js";
import { Timelines } from "./timelines.js";

const AGAIN_MS = 250; // while a request runs, its timeline grows
const CHARTS_MS = 2000;
const WINDOW_S = 60; // of the rates that the router reports
const APART_MS = 500; // between two moves of a request of which both are told at once
const CONNECTIONS = {
  connecting: "Connecting …",
  live: "Live",
  lost: "Connection lost, reconnecting …",
  refused: "API key required",
};

const requests = new Requests();
const relay = new Relay(byId("relay"));
const timelines = new Timelines(byId("requests"), byId("axis"));
const playground = new Playground(askForKey);
const feed = new Feed(told, connected);
const history = new History();
const charts = [
  new Chart("requests", "Requests per second", count),
  new Chart("first", "Time to first token", seconds),
  new Chart("tokens", "Tokens per second", count),
  new Chart("cache", "Prefix cache hit rate", (part) => share(part, 1)),
  new Chart("waiting", "Queued requests", count),
];

let service = null;
let named = new Map();
let ahead = 0; // milliseconds by which the router's clock is ahead of this one

function told(kind, value) {
  ahead = value.now - Date.now();
  if (kind === "service") showService(value);
  if (kind === "requests") {
    const delays = new Map();
    for (const move of requests.take(value.requests, value.now)) {
      const { number } = move.record;
      const after = delays.get(number) ?? 0;
      delays.set(number, after + APART_MS);
      relay.move(move, after);
    }
    showRequests();
  }
}

function connected(state, reason) {
  const element = byId("connection");
  element.dataset.state = state;
  say(element, CONNECTIONS[state]);
  if (state === "lost") history.gap(Date.now() + ahead);
  if (state === "live") {
    requests.clear();
    if (byId("key").open) byId("key").close();
  }
  byId("key-open").hidden = state !== "refused" && !key();
  if (state === "refused") askForKey(reason);
}

function showService(value) {
  service = value;
  named = labels(service.workers);
  service.workers.sort((one, other) => named.get(one.name).localeCompare(named.get(other.name), "en", { numeric: true }));
  const { pace } = service;
  const waiting = service.waiting?.reduce((sum, one) => sum + one.count, 0);
  history.add(value.now, {
    requests: pace.requests / WINDOW_S,
    first: pace.first_token_s,
    tokens: pace.tokens_s,
    cache: pace.prompt_tokens ? pace.cached_tokens / pace.prompt_tokens : null,
    waiting: waiting ?? null,
  });
  say(byId("figure-requests"), count(pace.requests / WINDOW_S));
  say(byId("figure-first"), seconds(pace.first_token_s));
  say(byId("figure-tokens"), count(pace.tokens_s));
  say(byId("figure-cache"), share(pace.cached_tokens, pace.prompt_tokens));
  say(byId("figure-waiting"), service.waiting ? count(waiting) : "–");
  say(byId("figure-waiting-note"), service.waiting ? "now" : "visible to admins");
  say(byId("version"), `Baton ${service.version}${service.tenant ? ` · ${service.tenant}` : ""}`);
  byId("refusal").hidden = !service.refusal;
  say(byId("refusal"), service.refusal ?? "");
  playground.offer(service.models, service.workers);
  relay.show(service, named);
  byId("workers").replaceChildren(...service.workers.map(row));
  if (service.workers_left_out) {
    const text = `and ${service.workers_left_out} more`;
    byId("workers").append(html("tr", {}, html("td", { colspan: 8 }, text)));
  }
  showRequests();
  showCharts();
}

function row(worker) {
  const { load } = worker;
  const label = named.get(worker.name);
  const cells = [
    addressOf(worker, label),
    worker.model,
    [stateOf(worker), ...remarksOf(worker)].join(": "),
    count(worker.computing),
    count(worker.generating),
    load ? count(load.queued) : "–",
    load ? `${count(load.used_blocks)} of ${count(load.total_blocks)}` : "–",
  ];
  const revision = worker.revision ? ` (${worker.revision})` : "";
  return html(
    "tr", {},
    html("th", { scope: "row" }, label + revision),
    ...cells.map((text) => html("td", {}, text)),
  );
}

function showRequests() {
  const now = Date.now() + ahead;
  byId("no-requests").hidden = requests.all.length > 0;
  timelines.show(requests.all, named, now);
  playground.follow(requests, named, now);
}

function showCharts() {
  for (const chart of charts) chart.show(history, Date.now() + ahead);
}

function askForKey(reason) {
  const dialog = byId("key");
  if (reason) say(byId("key-reason"), `${reason} The key is kept until you close this tab and sent only to this server.`);
  byId("key-open").hidden = false;
  if (!dialog.open) dialog.showModal();
  byId("key-field").focus();
}

byId("key-open").addEventListener("click", () => askForKey(""));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keep(byId("key-field").value.trim());
  byId("key-field").value = "";
  byId("key").close();
  feed.start();
});
byId("key-forget").addEventListener("click", () => {
  keep("");
  byId("key").close();
  feed.start();
});

addEventListener("pagehide", () => feed.stop());
addEventListener("pageshow", (event) => event.persisted && feed.start());

setInterval(() => {
  if (!document.hidden && service && requests.all.some((record) => record.outcome === "running")) showRequests();
}, AGAIN_MS);
setInterval(() => {
  if (!document.hidden && service) showCharts();
}, CHARTS_MS);

feed.start();
