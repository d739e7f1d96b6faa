// Curves: one panel per number, one line per run. All panels share a cursor, moved by the pointer or the arrow keys.

const BOX = { width: 340, height: 168, left: 42, right: 16, top: 8, bottom: 24 };
const EPOCHS = RUNS.flatMap((run) => run.curves.epochs); // all panels show the same range, so that the cursor is at the same place
const panels = [];
let cursor = null; // an epoch; null: the last one

function ticks(low, high, wanted, whole) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((v) => v >= raw);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}
function tickText(value, all) {
  const step = all.length > 1 ? all[1] - all[0] : 1;
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9)));
  const shown = digits && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6 ? digits + 1 : digits;
  return Math.abs(value) >= 10000 ? `${value / 1000}k` : value.toFixed(shown);
}

function frame(svg, xs, ys, xTitle) {
  // Draws axes for these values and returns the scales.
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  if (low > 0 && low < 0.5 * high) low = 0;
  const pad = (high - low) * 0.04 || Math.abs(high) * 0.05 || 0.5;
  [low, high] = [low === 0 ? 0 : low - pad, high + pad];
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  const x = (v) => BOX.left + ((v - left) / (right - left || 1)) * (BOX.width - BOX.left - BOX.right);
  const y = (v) => BOX.height - BOX.bottom - ((v - low) / (high - low)) * (BOX.height - BOX.top - BOX.bottom);
  const marks = ticks(low, high, 4);
  for (const v of marks) {
    svg.append(s("line", { class: "grid", x1: BOX.left, x2: BOX.width - BOX.right, y1: y(v), y2: y(v) }));
    svg.append(s("text", { x: BOX.left - 5, y: y(v) + 3.5, "text-anchor": "end" }, tickText(v, marks)));
  }
  const end = `${xTitle} ${right}`;
  const below = ticks(left, right, 5, true).filter((v) => x(v) < BOX.width - BOX.right - 6 * end.length - 14);
  for (const v of below) svg.append(s("text", { x: x(v), y: BOX.height - 8, "text-anchor": "middle" }, String(v)));
  svg.append(s("text", { x: BOX.width - BOX.right, y: BOX.height - 8, "text-anchor": "end" }, end));
  return { x, y, left, right };
}

function lineOf(points, x, y) {
  return points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
}
const readings = (run, name) =>
  (run.curves.values[name] || []).map((value, i) => [run.curves.epochs[i], value]).filter(([, value]) => value !== null);
const at = (points, epoch) => points.filter(([e]) => e <= epoch).at(-1) || null;

function curvePanel({ name, meaning }) {
  const lines = RUNS.map((run) => ({ run, points: readings(run, name), text: run.letter, color: runColor(run), dash: runDash(run) }))
    .filter((line) => line.points.length);
  return epochPanel(name, meaning, lines, MANY);
}

function epochPanel(name, meaning, lines, labeled) {
  const svg = s("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, tabindex: 0, role: "slider", "aria-label": `${name} by epoch` });
  const points = lines.flatMap((line) => line.points);
  const { x, y, left, right } = frame(svg, EPOCHS, points.map((p) => p[1]), "epoch");
  for (const { points: own, color, dash } of lines) {
    svg.append(s("path", { class: "curve", d: lineOf(own, x, y), style: { stroke: color }, "stroke-dasharray": dash || null }));
    const sparse = own.length < 6 || own.length <= (own.at(-1)[0] - own[0][0]) / 2 + 1; // not a value per epoch
    if (sparse && own.length < 60) for (const [a, b] of own) svg.append(s("circle", { cx: x(a), cy: y(b), r: 2, style: { fill: color } }));
  }
  if (labeled) endLabels(svg, lines, x, y);
  const rule = s("line", { class: "cursor", y1: BOX.top, y2: BOX.height - BOX.bottom, visibility: "hidden" });
  const dots = lines.map(({ color }) => s("circle", { r: 3.6, style: { fill: color }, visibility: "hidden" }));
  svg.append(rule, ...dots);
  const readout = h("p", { class: "readout" });
  const update = () => {
    const epoch = Math.max(left, Math.min(cursor ?? right, right));
    const found = lines.map((line) => at(line.points, epoch));
    const shown = cursor === null ? "hidden" : "visible";
    fill(rule, { x1: x(epoch), x2: x(epoch), visibility: shown }, []);
    found.forEach((p, i) => fill(dots[i], p ? { cx: x(p[0]), cy: y(p[1]), visibility: shown } : { visibility: "hidden" }, []));
    const parts = found.map((p, i) => p && [" · ", labeled && `${lines[i].text} `, h("b", {}, number(p[1])), p[0] !== epoch && ` (epoch ${p[0]})`]);
    readout.replaceChildren(...[`epoch ${epoch}`, ...parts.flat()].filter(Boolean));
    fill(svg, { "aria-valuemin": left, "aria-valuemax": right, "aria-valuenow": epoch, "aria-valuetext": readout.textContent }, []);
  };
  steer(svg, left, right);
  panels.push(update);
  return h("div", { class: "panel", "data-curve": name }, h("h4", {}, name), h("p", { class: "meaning" }, meaning), readout, svg);
}

function endLabels(svg, lines, x, y) {
  // Letters at the ends of the lines, moved apart if they would overlap.
  const ends = lines.map((line) => ({ line, x: x(line.points.at(-1)[0]) + 4, y: y(line.points.at(-1)[1]) + 3.5 })).sort((a, b) => a.y - b.y);
  ends.forEach((end, i) => { if (i && end.y - ends[i - 1].y < 10 && Math.abs(end.x - ends[i - 1].x) < 12) end.y = ends[i - 1].y + 10; });
  for (const end of ends) svg.append(s("text", { x: end.x, y: end.y, style: { fill: end.line.color, "font-weight": 700 } }, end.line.text));
}

function steer(svg, left, right) {
  const move = (epoch) => { cursor = epoch === null ? null : Math.max(left, Math.min(right, epoch)); panels.forEach((update) => update()); };
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * BOX.width - BOX.left) / (BOX.width - BOX.left - BOX.right);
    move(Math.round(left + share * (right - left)));
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") move(null); });
  svg.addEventListener("blur", () => move(null));
  svg.addEventListener("keydown", (event) => {
    const now = cursor ?? right;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now + 10, PageDown: now - 10, Home: left, End: right, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(to);
  });
}

// Purity by rank: over epochs for one run, and over the ranks at the cursor's epoch.
function ranksOf(run, pattern) {
  return Object.keys(run.curves.values).map((name) => pattern.exec(name)).filter(Boolean).map((m) => Number(m[1])).sort((a, b) => a - b);
}

function profilePanel(meaning) {
  const svg = s("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": "purity by rank" });
  const readout = h("p", { class: "readout" });
  const kinds = [{ pattern: /^purity_(\d+)$/, prefix: "purity_", cas: false }];
  if (!MANY) kinds.push({ pattern: /^purity_cas_(\d+)$/, prefix: "purity_cas_", cas: true });
  const series = RUNS.flatMap((run) => kinds.map((kind) => ({ run, ...kind, ranks: ranksOf(run, kind.pattern) }))).filter((one) => one.ranks.length);
  const last = Math.max(...series.flatMap(({ run }) => run.curves.epochs));
  const everything = series.flatMap(({ run, prefix, ranks }) => ranks.flatMap((k) => readings(run, prefix + k).map((p) => p[1])));
  const update = () => {
    svg.replaceChildren();
    const epoch = cursor ?? last;
    const { x, y } = frame(svg, series.flatMap((one) => one.ranks), everything, "rank");
    const parts = [`epoch ${epoch}`];
    const lines = series.map(({ run, prefix, ranks, cas }) => {
      const points = ranks.map((k) => [k, at(readings(run, prefix + k), epoch)?.[1]]).filter((p) => p[1] !== undefined);
      const style = { stroke: runColor(run), opacity: cas ? 0.6 : 1 };
      svg.append(s("path", { class: "curve", d: lineOf(points, x, y), style, "stroke-dasharray": cas ? "2 3.5" : runDash(run) || null }));
      points.forEach(([a, b]) => svg.append(s("circle", { cx: x(a), cy: y(b), r: 2.4, style: { fill: runColor(run), opacity: cas ? 0.6 : 1 } })));
      if (points.length) parts.push(" · ", MANY ? `${run.letter} ` : cas ? "by attention " : "by distance ", h("b", {}, points.map((p) => p[1].toFixed(2)).join(" ")));
      return { points, text: MANY ? run.letter : "", color: runColor(run) };
    });
    if (MANY) endLabels(svg, lines.filter((line) => line.points.length), x, y);
    readout.replaceChildren(...parts);
  };
  panels.push(update);
  const text = MANY ? meaning : "share of k-th neighbors with the anchor's label, nearest first (solid) and in order of attention, CAS (dotted)";
  return h("div", { class: "panel", "data-curve": "purity by rank" }, h("h4", {}, "purity by rank"), h("p", { class: "meaning" }, text), readout, svg);
}

function rankPanel(meaning) {
  const ranks = ranksOf(RUNS[0], /^purity_(\d+)$/);
  const lines = ranks.map((k, i) => ({
    run: RUNS[0], points: readings(RUNS[0], `purity_${k}`), text: String(k), dash: "",
    color: `color-mix(in srgb, ${runColor(RUNS[0])} ${Math.round(100 - (75 * i) / Math.max(1, ranks.length - 1))}%, var(--line))`,
  })).filter((line) => line.points.length);
  return lines.length > 1 ? epochPanel("purity_k", meaning, lines, true) : null;
}

function drawCurves() {
  const legend = MANY && h("ul", { class: "legend" }, RUNS.map((run) => h("li", {},
    s("svg", { viewBox: "0 0 34 8", "aria-hidden": "true" }, s("line", { class: "curve", x1: 1, x2: 33, y1: 4, y2: 4, style: { stroke: runColor(run) }, "stroke-dasharray": runDash(run) || null })),
    letter(run), run.name)));
  const panel = ({ name, meaning }) => name === "purity_k" ? [profilePanel(meaning), !MANY && rankPanel(meaning)] : curvePanel({ name, meaning });
  const groups = DATA.groups.map(({ title, panels: own }) => [h("h3", {}, title), h("div", { class: "panels" }, own.map(panel).flat())]);
  if (!groups.length) return section("curves");
  section("curves", h("p", { class: "note" }, "Means over the steps of each epoch. Hover over a curve, or focus it and use the arrow keys, to read all curves at that epoch."), legend, groups.flat());
  panels.forEach((update) => update());
}
