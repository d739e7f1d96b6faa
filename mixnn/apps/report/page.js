// The page from top to bottom: verdict, judgement without labels, what was run, differences, results, curves, map, neighbors.

const MARKS = {
  learning: ["✓", "good"], rising: ["↗", "good"], flat: ["→", "wait"], worse: ["↘", "bad"], collapsed: ["✗", "bad"], shrunk: ["✗", "bad"], diverged: ["✗", "bad"],
  interrupted: ["‖", "wait"], short: ["…", "wait"], unlabeled: ["?", "wait"], untrained: ["○", "wait"], start: ["○", "good"],
  judged: ["✓", "good"], color: ["✗", "bad"], below_start: ["↘", "bad"], kept_start: ["↩", "wait"], kept_earlier: ["↩", "wait"],
};

function drawHeader() {
  const names = RUNS.map((run) => run.name).join(", ");
  document.title = `${names} - mixnn report`;
  byId("title").append(RUNS.map((run) => (MANY ? `${run.letter} ${run.name}` : run.name)).join(", "));
  const first = RUNS[0].overview;
  byId("subtitle").append(MANY ? RUNS.map((run) => `${run.letter}: ${run.method} on ${run.data}`).join("; ") : `${RUNS[0].method} on ${first.data}; ${first.progress}`);
  byId("contents").append(...[...document.querySelectorAll("main section")].map((node) => h("a", { href: `#${node.id}` }, node.querySelector("h2").textContent)));
  byId("footer").append(`Made by mixnn ${DATA.version}. This file is complete: it loads nothing from the network.`);
}

function drawVerdict() {
  const cards = RUNS.map((run) => {
    const [mark, tone] = MARKS[run.verdict.state] || ["", "wait"];
    return h("div", { class: "card", "data-state": run.verdict.state },
      MANY && runName(run),
      h("p", { class: `state ${tone}` }, h("span", { class: "mark", "aria-hidden": "true" }, mark), run.verdict.title),
      run.headlines.length ? h("dl", { class: "figures" }, run.headlines.map(({ label, value }) => h("div", {}, h("dt", {}, label), h("dd", {}, `${percent(value)}%`)))) : null,
      h("ul", {}, run.verdict.sentences.map((text) => h("li", {}, text))));
  });
  const missing = RUNS.flatMap((run) => run.missing.map((text) => h("p", { class: "warning" }, MANY && [letter(run), " "], text)));
  section("verdict", h("div", { class: "cards" }, cards), missing,
    h("details", {}, h("summary", {}, "How the verdict is reached"), h("p", { class: "note" }, "The first of these rules that applies to the curves decides. The thresholds are conventions: look at the curves, too."), h("ul", { class: "rules note" }, DATA.rules.map((rule) => h("li", {}, rule)))));
}

function drawJudgement() {
  const judged = RUNS.filter((run) => run.judgement.rows);
  if (!judged.length) return section("judgement");
  const note = "Measured during training on a fixed sample of the images and two random views of each, before training and at up to four points of the run.";
  return section("judgement", h("p", { class: "note" }, note), judged.map((run) => [MANY && runName(run),
    table(["number", ...run.judgement.columns.map((name) => h("th", { scope: "col", class: "num" }, name))],
      run.judgement.rows.map((row) => [settingName(row.name, row.meaning), ...row.values.map((value) => h("td", { class: "num" }, value))]), "narrow")]).flat());
}

// Line breaks only between words: a break after a hyphen would change an option.
const spaced = (text) => text.split(" ").flatMap((word, i) => [i ? " " : "", h("span", {}, word)]);
const settingName = (name, meaning) => h("th", { scope: "row" }, h("code", {}, name), h("small", {}, meaning));
const runHeads = () => RUNS.map((run) => h("th", { scope: "col" }, letter(run), " ", run.name));

function drawDifferences() {
  if (!MANY) return section("differences");
  // Options that only one of several methods has would leave gaps in the table: they get one line per run.
  const shared = DATA.differences.filter(({ values }) => values.filter((v) => v !== null).length > 1);
  const rows = shared.map(({ name, meaning, values }) => [settingName(name, meaning), ...values.map((v) => h("td", { class: "mono" }, v ?? "–"))]);
  const lines = RUNS.map((run, i) => {
    const own = DATA.differences.filter((row) => !shared.includes(row) && row.values[i] !== null);
    return own.length ? h("p", { class: "own" }, "Only ", letter(run), ` (${run.method}) has: `, h("code", {}, own.map(({ name, values }) => `${name}=${values[i]}`).join(", "))) : null;
  });
  return section("differences", rows.length ? table(["setting", ...runHeads()], rows, "narrow") : h("p", {}, "The runs have the same settings."), lines);
}

function protocolLines(found) {
  // The settings that all runs share in one line, then those that differ.
  const there = found.filter(Boolean);
  const words = (result, names) => names.map((name) => `${name} ${result.protocol[name] ?? "not recorded"}`).join(" · ");
  const names = [...new Set(there.flatMap((result) => Object.keys(result.protocol)))];
  const common = names.filter((name) => there.every((result) => result.protocol[name] === there[0].protocol[name]));
  const own = names.filter((name) => !common.includes(name));
  const lines = new Map();
  found.forEach((result, i) => { if (result && own.length) lines.set(words(result, own), [...(lines.get(words(result, own)) || []), RUNS[i].letter]); });
  return [words(there[0], common), ...[...lines].map(([text, letters]) => `${letters.join(", ")}: ${text}`)].filter(Boolean);
}

function drawResults() {
  const keys = [...new Map(RUNS.flatMap((run) => run.results.map((result) => [result.key, result.label])))];
  const rows = keys.flatMap(([key, label]) => {
    const found = RUNS.map((run) => run.results.find((result) => result.key === key));
    return [h("tr", { class: "result" }, h("th", { scope: "row" }, label), found.map((result) => h("td", { class: "num" }, result ? `${percent(result.value)}%` : "–"))),
      h("tr", {}, h("td", { colspan: RUNS.length + 1 }, protocolLines(found).map((line) => h("small", {}, line))))];
  });
  const others = RUNS.flatMap((run) => Object.entries(run.otherResults).map(([name, text]) =>
    h("details", {}, h("summary", {}, MANY ? `${run.letter}: ` : "", `${name} in results.json`), h("pre", {}, text))));
  if (!rows.length && !others.length) return section("results");
  const noise = "Accuracies on test images. Differences of less than a percentage point between single runs may come from the seed alone.";
  const heads = MANY ? RUNS.map((run) => h("th", { scope: "col", class: "num" }, letter(run))) : [h("th", { scope: "col", class: "num" }, "accuracy")];
  const warnings = DATA.warnings.map((text) => h("p", { class: "warning" }, text));
  return section("results", h("p", { class: "note" }, noise), warnings, rows.length ? table(["result and protocol", ...heads], rows) : null, others);
}

function drawProtocol() {
  const labels = { data: "data", method: "method", network: "network", training: "training", seed: "seed", progress: "progress", machine: "machine", code: "code", folder: "folder" };
  const cards = RUNS.map((run) => h("div", { class: "card" }, MANY && runName(run),
    table(null, Object.entries(labels).map(([key, label]) => [label, run.overview[key]]), "kv"),
    h("h3", {}, "Command"), h("pre", {}, spaced(run.overview.command || "not recorded")),
    h("h3", {}, "Settings that differ from the defaults"),
    changedSettings(run.changed),
    h("details", {}, h("summary", {}, "All settings"), table(["setting", "value"], run.settings.map((row) => [settingName(row.name, row.source ? `${row.meaning} [${row.source}]` : row.meaning), h("td", { class: "mono" }, row.value)]))),
    environment("Training environment", run.environment), environment("Evaluation environment", run.evaluatedWith)));
  section("protocol", h("div", { class: "cards" }, cards));
}

function changedSettings(rows) {
  if (!rows.length) return h("p", {}, "None.");
  const known = rows.some((row) => row.setBy); // runs of older versions do not say who set what
  const heads = ["setting", "value", "default", ...(known ? ["set by"] : [])];
  return table(heads, rows.map((row) => [settingName(row.name, row.meaning), h("td", { class: "mono" }, row.value), h("td", { class: "mono" }, row.default), ...(known ? [h("td", {}, row.setBy)] : [])]));
}

function environment(title, values) {
  const rows = Object.entries(values);
  return rows.length ? h("details", {}, h("summary", {}, title), table(null, rows.map(([name, value]) => [name, h("td", { class: "mono" }, value)]), "kv")) : null;
}

drawVerdict();
drawJudgement();
drawProtocol();
drawDifferences();
drawResults();
drawCurves();
drawMap();
drawNeighbors();
drawHeader();
document.documentElement.dataset.ready = "true";
