// The page of `infini-job serve`: the list of jobs, one job's ranks, its lines.
//
// The one rule: what comes from a job is text. Nodes are made and given text; nothing is ever read as HTML.
"use strict";

const at = (id) => document.getElementById(id);
const KEPT = 5000; // lines on the page; all of them: infini-job logs
const TICK_MS = 5000; // between two looks at the clock, for durations that grow
const jobs = new Map(); // by name, the latest last
let chosen = "";
let lives = []; // of the chosen one
let lines = null; // the AbortController of the lines that are followed

function make(tag, text, attributes) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  return made;
}

function shell(words) {
  return words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`)).join(" ");
}

const date = (s) => new Date(s * 1000).toLocaleString();
const clock = (s) => (s ? new Date(s * 1000).toLocaleTimeString() : "");

function duration(seconds) { // in two units at most, such as 1 h 29 min
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const whole = Math.max(0, Math.floor(seconds));
  const first = units.findIndex(([, each]) => whole >= each || each === 1);
  const [[unit, each], below] = [units[first], units[first + 1]];
  const rest = below ? Math.floor((whole % each) / below[1]) : 0;
  return `${Math.floor(whole / each)} ${unit}${rest ? ` ${rest} ${below[0]}` : ""}`;
}

const ago = (since) => `${duration(Date.now() / 1000 - since)} ago`;

// ---- the list

function listen() {
  const source = new EventSource("v1/events");
  let isNew = true;
  source.addEventListener("open", () => { isNew = true; });
  source.addEventListener("error", () => { at("news").textContent = "Not connected; retrying. Check that infini-job serve runs"; });
  source.addEventListener("jobs", (event) => {
    const { jobs: changed, gone, problem } = JSON.parse(event.data);
    if (isNew) jobs.clear(); // connected anew: this is all there is
    isNew = false;
    for (const name of gone) jobs.delete(name);
    for (const job of changed) jobs.set(job.name, job);
    at("news").textContent = problem || "Live";
    showList();
    if (changed.some((job) => job.name === chosen.split(".")[0])) showJob();
  });
}

function showList() {
  const focused = document.activeElement?.getAttribute("href");
  at("jobs").replaceChildren(...[...jobs.values()].reverse().map(row));
  at("none").hidden = jobs.size > 0;
  if (focused) [...at("jobs").querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
}

function row(job) {
  const made = make("tr", undefined, job.name === chosen ? { "aria-current": "true" } : {});
  const name = make("td");
  name.append(make("a", job.name, { href: `#${job.name}` }));
  made.append(
    name,
    make("td", job.headline, { class: `state ${job.state}` }),
    make("td", ago(job.since_s), { title: date(job.since_s), "data-since": job.since_s }),
    make("td", job.scheduler),
    make("td", job.shape),
    make("td", shell(job.command), { class: "command" }),
  );
  return made;
}

// ---- one job

function find(name) { // a job, or the task of an array: what they have in common is the array's
  const job = jobs.get(name.split(".")[0]);
  if (job?.name === name) return job;
  const task = job?.tasks.find((one) => one.name === name);
  return task && { ...job, ...task, tasks: [] };
}

function choose() {
  const name = location.hash.slice(1);
  if (!/^ir-[0-9a-f]{10}(\.\d+)?$/.test(name) || name === chosen) return;
  chosen = name;
  lives = [];
  at("job").hidden = false;
  at("title").textContent = chosen;
  for (const id of ["headline", "reason", "runs", "facts"]) at(id).replaceChildren();
  at("rank").value = "";
  options(at("node"), []);
  options(at("attempt"), []);
  showList();
  showJob();
  follow();
}

function showJob() {
  const job = find(chosen);
  at("cancel").hidden = !job || job.is_final;
  if (!job) return;
  at("headline").textContent = job.headline;
  at("headline").className = job.state;
  const reason = job.state === "QUEUED" ? "" : job.reason; // it is in the headline
  at("reason").textContent = [reason, job.advice, job.query_error].filter(Boolean).join("\n");
  const facts = [
    ["Command", shell(job.command)],
    ["Submitted", date(job.submitted_s)],
    ["Scheduler", `${job.scheduler} ${job.id}`],
    ["Size", job.shape],
    ["Nodes", job.nodes.join(" ")],
    ["Directory", job.folder],
  ];
  const shown = facts.filter(([, text]) => text).flatMap(([name, text]) => [make("dt", name), make("dd", text)]);
  at("facts").replaceChildren(...shown);
  options(at("node"), job.nodes);
  options(at("attempt"), [...Array(job.attempt + 1).keys()].map(String));
  at("ranks-title").textContent = job.tasks.length ? "Tasks" : "Ranks";
  if (job.tasks.length) showTasks(job.tasks);
  else showLives(chosen);
}

function showTasks(tasks) {
  const focused = document.activeElement?.getAttribute("href");
  const table = make("table", undefined, { class: "tasks" });
  table.append(...tasks.map((task) => {
    const made = make("tr");
    const name = make("td");
    name.append(make("a", task.name, { href: `#${task.name}` }));
    made.append(name, make("td", task.headline, { class: `state ${task.state}` }), make("td", task.reason));
    return made;
  }));
  at("runs").replaceChildren(table);
  if (focused) [...table.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
}

function options(select, values) {
  const before = select.value;
  const made = values.map((value) => make("option", value, { value }));
  select.replaceChildren(make("option", "all", { value: "" }), ...made);
  select.value = values.includes(before) ? before : "";
}

// ---- its ranks

async function showLives(name) {
  try {
    const answer = await fetch(`v1/jobs/${name}/timeline`);
    const content = await answer.json();
    if (name !== chosen) return;
    if (!answer.ok) throw new Error(content.detail);
    lives = content;
    drawLives();
  } catch (error) {
    if (name === chosen) at("runs").replaceChildren(make("p", error.message, { class: "failed" }));
  }
}

function drawLives() {
  at("runs").replaceChildren(...(lives.length ? lives.map(life) : [make("p", "It has not started.")]));
}

function life(run) {
  const now = Date.now() / 1000;
  const from = Math.min(...run.ranks.map((rank) => rank.start_s));
  const until = Math.max(...run.ranks.map((rank) => rank.end_s || now));
  const scale = { from, span: until - from || 1, now };
  const table = make("table", undefined, { class: "ranks" });
  table.append(make("caption", `Run ${run.attempt}: ${run.state}${run.failure ? `: ${run.failure}` : ""}`));
  const head = make("thead");
  const names = make("tr");
  names.append(...["Rank", "Started", "Ready", "Ended", "Ran for", "How", "When"].map((name) => make("th", name, { scope: "col" })));
  head.append(names);
  table.append(head);
  for (const host of new Set(run.ranks.map((rank) => rank.host))) {
    const body = make("tbody");
    const title = make("tr");
    title.append(make("th", host || "unknown node", { scope: "rowgroup", colspan: "7" }));
    body.append(title, ...run.ranks.filter((rank) => rank.host === host).map((rank) => line(rank, scale)));
    table.append(body);
  }
  return table;
}

function line(rank, scale) {
  const made = make("tr", undefined, rank.is_first ? { class: "first" } : {});
  const end = [rank.end, rank.kind === "stopped" || !rank.end ? rank.kind : "", rank.is_first ? "first failure" : ""];
  made.append(
    make("td", String(rank.rank)),
    make("td", clock(rank.start_s)),
    make("td", clock(rank.ready_s)),
    make("td", clock(rank.end_s)),
    make("td", duration((rank.end_s || scale.now) - rank.start_s)),
    make("td", end.filter(Boolean).join(", "), { class: rank.kind }),
    track(rank, scale),
  );
  return made;
}

function track(rank, { from, span, now }) { // what it shows is in the row as text
  const made = make("td", undefined, { class: "track", "aria-hidden": "true" });
  const percent = (seconds) => `${(100 * seconds) / span}%`;
  const bar = make("span", undefined, { class: `bar ${rank.kind}` });
  bar.style.left = percent(rank.start_s - from);
  bar.style.width = percent((rank.end_s || now) - rank.start_s);
  made.append(bar);
  if (rank.ready_s) {
    const tick = make("span", undefined, { class: "tick" });
    tick.style.left = percent(rank.ready_s - from);
    made.append(tick);
  }
  return made;
}

// ---- its lines

async function follow() {
  lines?.abort();
  const mine = new AbortController();
  lines = mine;
  const say = (text) => { if (mine === lines) at("log-news").textContent = text; };
  const ask = new URLSearchParams({ follow: "true" });
  for (const id of ["node", "rank", "attempt"]) if (at(id).value) ask.set(id, at(id).value);
  at("log").replaceChildren();
  say("Following");
  try {
    const answer = await fetch(`v1/jobs/${chosen}/logs?${ask}`, { signal: mine.signal });
    if (!answer.ok) say((await answer.json()).detail);
    else if (await read(answer.body, mine)) say("The job finished");
  } catch (error) {
    if (mine === lines) say("Connection lost; reload the page");
  }
}

async function read(stream, mine) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (mine !== lines) return false;
    if (done) return true;
    const whole = (rest + value).split("\n");
    rest = whole.pop();
    write(whole);
  }
}

function write(whole) {
  const box = at("log");
  box.append(...whole.slice(-KEPT).map(written));
  while (box.childElementCount > KEPT) box.firstElementChild.remove();
  if (at("stick").checked) box.scrollTop = box.scrollHeight;
}

function written(text) {
  const plain = text.replace(/\x1b\[[0-?]*[ -/]*[@-~]/g, ""); // a terminal's colors
  const label = /^(\[task \d+\] )?\[[^\]]*\] |^\[task \d+\] /.exec(plain)?.[0] ?? "";
  const made = make("div", undefined, plain.startsWith("infini-run: ") ? { class: "ours" } : {});
  made.append(make("span", label, { class: "label" }), plain.slice(label.length) || "\u00a0");
  return made;
}

// ---- its end

async function cancel(name) {
  at("ask").close();
  try {
    const answer = await fetch(`v1/jobs/${name}/cancel`, { method: "POST", headers: { "X-Infini-Job": "1" } });
    if (!answer.ok) throw new Error((await answer.json()).detail);
  } catch (error) {
    at("reason").textContent = error.message;
  }
}

at("cancel").addEventListener("click", () => {
  at("ask-title").textContent = `Cancel ${chosen}?`;
  at("ask").dataset.name = chosen;
  at("ask").showModal();
});
at("leave").addEventListener("click", () => at("ask").close());
at("end").addEventListener("click", () => cancel(at("ask").dataset.name));
for (const id of ["node", "rank", "attempt"]) at(id).addEventListener("change", follow);
window.addEventListener("hashchange", choose);
setInterval(() => {
  if (document.hidden) return;
  for (const cell of at("jobs").querySelectorAll("[data-since]")) cell.textContent = ago(Number(cell.dataset.since));
  if (lives.some((run) => run.ranks.some((rank) => rank.kind === "running"))) drawLives();
}, TICK_MS);
listen();
choose();
