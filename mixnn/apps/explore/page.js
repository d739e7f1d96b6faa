// The side panel: colors, search by name, neighbors, selections, groups. Text enters the page as text, never as HTML.

const announce = (text) => { byId("announcement").textContent = text; }; // for screen readers
const make = (tag, className, text = "") => {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
};
const narrow = matchMedia("(max-width: 760px)"), dark = matchMedia("(prefers-color-scheme: dark)");

// Colors

const TEN = [
  [78, 121, 167], [242, 142, 43], [225, 87, 89], [72, 172, 160], [89, 161, 79],
  [214, 176, 40], [176, 122, 161], [255, 140, 165], [156, 117, 95], [110, 115, 130],
];
const lit = (rgb) => dark.matches ? rgb.map((v) => Math.round(v + (255 - v) * 0.22)) : rgb;
const pack = ([r, g, b]) => (0xff000000 | b << 16 | g << 8 | r) >>> 0;
const theme = {};
let mode = meta.predicted && labeled < N / 2 ? "predicted" : hasLabels ? "label" : "cluster", modeChosen = false;

/** Ten distinct colors; with more classes, hues from around the color circle, which names must tell apart. */
function colorOf(n, count) {
  if (count <= TEN.length) return lit(TEN[n]);
  const hue = n * 137.508 % 360, light = [0.5, 0.62, 0.4][n % 3], a = 0.7 * Math.min(light, 1 - light);
  return lit([0, 8, 4].map((k) => {
    const at = (k + hue / 30) % 12;
    return Math.round(255 * (light - a * Math.max(-1, Math.min(at - 3, 9 - at, 1))));
  }));
}

/** Orange (0) through gray, or another color, to blue (1). */
function ramp(t, middle = dark.matches ? [120, 118, 116] : [190, 188, 184]) {
  const stops = [[224, 106, 16], middle, dark.matches ? [84, 160, 255] : [24, 92, 190]];
  const [from, to, u] = t < 0.5 ? [stops[0], stops[1], 2 * t] : [stops[1], stops[2], 2 * t - 1];
  return from.map((v, c) => Math.round(v + (to[c] - v) * u));
}

const numClusters = clusters.reduce((most, c) => Math.max(most, c + 1), 0);
const numberOrNone = (of) => (i) => of[i] === NONE ? -1 : of[i];
const MODES = { // a mode has classes, or a value from 0 to 1; -1 is none
  label: { title: "Label", classes: () => meta.classes, of: numberOrNone(labels), none: "no label" },
  predicted: { title: "Predicted label", classes: () => meta.classes, of: numberOrNone(predicted), none: "no prediction" },
  confidence: {
    title: "Confidence of the prediction", value: (i) => confidences[i], ends: ["0", "1"], middle: [200, 70, 150], // not gray, which is for given labels
    help: "How sure the classifier is of the predicted label. Gray: images whose label was given.",
  },
  cluster: {
    title: "Cluster (k-means)", classes: () => Array.from({ length: numClusters }, (_, c) => `cluster ${c + 1}`),
    of: (i) => clusters[i], none: "",
  },
  purity: {
    title: "Neighbor purity", value: (i) => purity[i], ends: ["none", "all"],
    help: `Share of an image's ${K} nearest neighbors with the same label.`,
  },
  group: { title: "Group", classes: () => groups.titles(), of: (i) => groups.of(i) - 1, none: "no group" },
};
if (!hasLabels) { delete MODES.label; delete MODES.purity; }
if (!meta.predicted) { delete MODES.predicted; delete MODES.confidence; }

function recolor() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "map", "accent", "warn", "none"]) theme[name] = style.getPropertyValue(`--${name}`).trim();
  const hex = (name) => [1, 3, 5].map((at) => parseInt(theme[name].slice(at, at + 2), 16));
  const none = pack(hex("none")), colors = new Uint32Array(N), { classes, of, value, middle } = MODES[mode];
  const palette = classes ? classes().map((_, n, all) => pack(colorOf(n, all.length))) : [];
  for (let i = 0; i < N; i++) {
    if (value) colors[i] = value(i) < 0 ? none : pack(ramp(value(i), middle));
    else colors[i] = of(i) < 0 ? none : palette[of(i)];
  }
  map.setColors(colors, pack(hex("map")), theme);
  map.marks.tags = ["label", "predicted", "group"].includes(mode) ? tags(classes(), of) : [];
  drawLegend(palette, none);
}

/** The name of each class, at its image nearest to the median; none if there are too many to read. */
function tags(classes, of) {
  if (classes.length > 40) return [];
  const of_class = classes.map(() => []);
  for (let i = 0; i < N; i++) if (of(i) >= 0) of_class[of(i)].push(i);
  return of_class.flatMap((members, c) => {
    if (!members.length) return [];
    const middle = [0, 1].map((a) => members.map((i) => points[2 * i + a]).sort((p, q) => p - q)[members.length >> 1]);
    const far = (i) => Math.hypot(points[2 * i] - middle[0], points[2 * i + 1] - middle[1]);
    const at = members.reduce((best, i) => far(i) < far(best) ? i : best);
    const text = classes[c].length > 24 ? `${classes[c].slice(0, 23)}…` : classes[c];
    return [{ text, x: points[2 * at], y: points[2 * at + 1] }];
  });
}

function drawLegend(palette, none) {
  const legend = byId("legend"), help = byId("legend-help"), { classes, of, none: unnamed, value, help: text } = MODES[mode];
  legend.replaceChildren();
  help.textContent = value ? text : mode === "group" && !classes().length ? "There are no groups yet." : "Click an entry to select its images.";
  if (value) return drawRamp(legend, MODES[mode]);
  const counts = new Uint32Array(palette.length + 1);
  for (let i = 0; i < N; i++) counts[of(i) + 1]++;
  const line = (c, text, color) => {
    const item = make("li", ""), button = make("button", ""), dot = make("span", "dot");
    dot.style.backgroundColor = map.css(color);
    button.type = "button";
    button.append(dot, make("span", "text", text), make("small", "", counts[c + 1].toLocaleString("en")));
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", (event) => {
      const on = button.getAttribute("aria-pressed") !== "true";
      const found = [];
      for (let i = 0; i < N; i++) if (of(i) === c) found.push(i);
      select(on ? event.shiftKey ? [...selection, ...found] : found : [], false);
      if (on) button.setAttribute("aria-pressed", "true");
    });
    item.append(button);
    legend.append(item);
  };
  classes().forEach((text, c) => line(c, text, palette[c]));
  if (counts[0] && palette.length) line(-1, unnamed, none);
  return undefined;
}

function drawRamp(legend, { ends: [low, high], middle }) {
  const item = make("li", "ramp"), canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
  canvas.width = 100;
  canvas.height = 1;
  for (let x = 0; x < 100; x++) { pen.fillStyle = map.css(pack(ramp(x / 99, middle))); pen.fillRect(x, 0, 1, 1); }
  item.append(make("span", "", low), canvas, make("span", "", high));
  legend.append(item);
}

for (const [name, { title }] of Object.entries(MODES)) byId("color").add(new Option(title, name));
byId("color").addEventListener("change", () => { mode = byId("color").value; modeChosen = true; recolor(); });
dark.addEventListener("change", () => { recolor(); drawGroups(); });

// Selecting

let selection = [];

function select(images, toName = true) {
  selection = [...new Set(images)];
  map.setSelected(selection);
  for (const button of byId("legend").querySelectorAll("button")) button.setAttribute("aria-pressed", "false");
  const some = selection.length > 0;
  byId("name-form").hidden = !some;
  byId("groups-help").hidden = some || groups.titles().length > 0;
  byId("ungroup").hidden = !selection.some((i) => groups.of(i));
  byId("selected").textContent = `${counted(selection.length, "image")} selected`;
  announce(some ? `${counted(selection.length, "image")} selected` : "selection cleared");
  if (some && toName && !narrow.matches) byId("name").focus({ preventScroll: true }); // on a phone the keyboard would hide the map
}

// Groups

function drawGroups() {
  const list = byId("group-list"), titles = groups.titles();
  list.replaceChildren(...titles.map((title, g) => {
    const item = make("li", ""), show = make("button", "show"), remove = make("button", "remove", "✕");
    const dot = make("span", "dot"), members = groups.members(g);
    dot.style.backgroundColor = map.css(pack(colorOf(g, titles.length)));
    show.type = remove.type = "button";
    show.title = "Select the images of this group";
    show.append(dot, make("span", "text", title), make("small", "", members.length.toLocaleString("en")));
    remove.title = "Remove this group";
    remove.setAttribute("aria-label", `Remove the group ${title}`);
    show.addEventListener("click", () => { select(members, false); byId("name").value = title; });
    remove.addEventListener("click", () => { groups.assign(members, ""); (list.querySelector(".remove") || byId("undo")).focus(); });
    item.append(show, remove);
    return item;
  }));
  byId("known").replaceChildren(...[...new Set([...titles, ...meta.classes])].map((title) => new Option(title, title)));
  byId("undo").disabled = !groups.canUndo();
  byId("clear").disabled = byId("export").disabled = !titles.length;
  byId("groups-help").hidden = selection.length > 0 || titles.length > 0;
}

groups.onChange(() => {
  if (!modeChosen && groups.titles().length) mode = byId("color").value = "group";
  drawGroups();
  if (map.marks.picked >= 0) byId("picked-facts").textContent = facts(map.marks.picked);
  if (mode === "group") recolor();
});
byId("name-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const title = byId("name").value.trim(), count = selection.length;
  if (!title) { byId("name").focus(); return; }
  groups.assign(selection, title);
  byId("name").value = "";
  select([]);
  announce(`${counted(count, "image")} named ${title}`);
  if (!narrow.matches) map.over.focus({ preventScroll: true, focusVisible: false });
});
byId("ungroup").addEventListener("click", () => { groups.assign(selection, ""); select([]); announce("removed from their groups"); });
byId("deselect").addEventListener("click", () => select([]));
byId("undo").addEventListener("click", () => { groups.undo(); announce("undone"); });
byId("clear").addEventListener("click", () => { groups.clear(); announce("groups cleared"); });
byId("export").addEventListener("click", groups.save);

// Picking: an image and its nearest neighbors

const trail = [];

function pick(i, back = false) {
  if (!back && map.marks.picked >= 0 && map.marks.picked !== i) trail.push(map.marks.picked);
  map.marks.picked = i;
  map.schedule(false);
  byId("picked-empty").hidden = true;
  byId("picked-body").hidden = false;
  thumbs.show(document.querySelector("#picked-image canvas"), i);
  byId("picked-name").textContent = names[i];
  byId("picked-facts").textContent = facts(i);
  byId("picked-back").hidden = !trail.length;
  byId("picked-open").hidden = !meta.served;
  if (meta.served) byId("picked-open").href = `/image/${i}`;
  byId("neighbors").replaceChildren(...Array.from({ length: K }, (_, k) => neighborItem(i, k)));
  const wrong = Array.from({ length: K }, (_, k) => isFalse(i, neighbors[i * K + k])).filter(Boolean).length;
  const text = !K ? "There is no other image." : purity[i] < 0 ? `The ${counted(K, "nearest image")}, with ${K === 1 ? "its similarity" : "their similarities"}.`
    : wrong ? `${wrong} of ${K} neighbors ${wrong === 1 ? "has" : "have"} another label (✗).` : "All labeled neighbors have the same label.";
  const guessed = Array.from({ length: K }, (_, k) => neighbors[i * K + k]).some((j) => labelOf(j) === "" && predictedOf(j) !== "");
  byId("picked-summary").textContent = guessed ? `${text} Labels in italics are predicted.` : text;
  announce(`${names[i]}. ${facts(i)}. ${text}`);
  byId("picked").scrollIntoView({ block: narrow.matches ? "start" : "nearest" });
}

function unpick() {
  trail.length = 0;
  map.marks.picked = -1;
  map.schedule(false);
  byId("picked-empty").hidden = false;
  byId("picked-body").hidden = true;
}

const facts = (i) => [
  hasLabels ? labelOf(i) === "" ? "no label" : `label: ${labelOf(i)}` : "",
  confidences[i] < 0 ? "" : `predicted: ${predictedOf(i)} (confidence ${confidences[i].toFixed(2)})`,
  `cluster ${clusters[i] + 1}`, groups.of(i) ? `group: ${groups.titles()[groups.of(i) - 1]}` : "",
].filter(Boolean).join(" · ");

function neighborItem(i, k) {
  const j = neighbors[i * K + k], item = make("li", ""), wrong = isFalse(i, j);
  const button = make("button", wrong ? "false" : ""), canvas = document.createElement("canvas");
  canvas.width = canvas.height = 128;
  thumbs.show(canvas, j);
  button.type = "button";
  button.title = `${names[j]}\n${facts(j).replaceAll(" · ", "\n")}`;
  const label = labelOf(j), guess = label === "" ? predictedOf(j) : "";
  const text = wrong ? `✗ ${label}` : label || guess;
  button.append(canvas, make("span", "rank", `${k + 1}. `), make("span", "", cosine(i, k).toFixed(3)));
  if (hasLabels || meta.predicted) button.append(make("span", guess === "" ? "label" : "label guess", text || "no label"));
  const said = guess !== "" ? `, predicted label ${guess}` : label === "" ? "" : wrong ? `, false neighbor: label ${label}` : `, label ${label}`;
  button.setAttribute("aria-label", `Neighbor ${k + 1}, similarity ${cosine(i, k).toFixed(3)}${said}: ${names[j]}`);
  button.addEventListener("click", () => { pick(j); map.reveal(j); });
  button.addEventListener("mouseenter", () => mark(j, false));
  button.addEventListener("mouseleave", () => mark(-1));
  button.addEventListener("focus", () => mark(j, false));
  button.addEventListener("blur", () => mark(-1));
  item.append(button);
  return item;
}

byId("picked-back").addEventListener("click", () => { const i = trail.pop(); pick(i, true); map.reveal(i); });
byId("picked-select").addEventListener("click", () => {
  const i = map.marks.picked;
  select([i, ...neighbors.subarray(i * K, i * K + K)]);
});

// The highlighted image, under the pointer or in the middle of the map, with its card

function mark(i, withCard = true) {
  const card = byId("card");
  map.marks.hovered = i;
  map.schedule(false);
  card.hidden = i < 0 || !withCard;
  if (card.hidden) return;
  thumbs.show(card.querySelector("canvas"), i);
  const cut = names[i].lastIndexOf("/") + 1; // the end of a long name says most
  card.querySelector("b").textContent = names[i].slice(cut);
  card.querySelector("span").textContent = [...names[i].slice(0, cut) ? [`in ${names[i].slice(0, cut)}`] : [], ...facts(i).split(" · ")].join("\n");
  const [x, y] = map.where(i), [width, height] = map.size(), box = card.getBoundingClientRect();
  const left = x + 14 + box.width <= width ? x + 14 : Math.max(0, x - 14 - box.width);
  const top = Math.min(Math.max(0, y - box.height / 2), Math.max(0, height - box.height));
  card.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}

// Finding by name

let lower = null, matches = [];

function find() {
  const text = byId("find").value.trim().toLowerCase();
  byId("found").hidden = !text;
  if (!text) { matches = []; return; }
  lower ||= names.map((name) => name.toLowerCase());
  matches = [];
  for (let i = 0; i < N; i++) if (lower[i].includes(text)) matches.push(i);
  byId("found-count").textContent = counted(matches.length, "image") + (matches.length > 50 ? ", the first 50:" : "");
  byId("found-select").hidden = !matches.length;
  byId("found-list").replaceChildren(...matches.slice(0, 50).map((i) => {
    const item = make("li", ""), button = make("button", "", names[i]);
    button.type = "button";
    button.addEventListener("click", () => { pick(i); map.reveal(i); });
    item.append(button);
    return item;
  }));
}

byId("find").addEventListener("input", find);
byId("find").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && matches.length) { pick(matches[0]); map.reveal(matches[0]); }
});
byId("found-select").addEventListener("click", () => select(matches));

// Title, summary and notes

byId("title").textContent = meta.title;
const pure = pairs && 2 * labeled >= N ? ` · neighbor purity ${(100 * alike / pairs).toFixed(1)}% (${K} nearest)` : "";
byId("summary").textContent = counted(N, "image") + pure;
map.over.setAttribute("aria-label", `Map of ${counted(N, "image")}`);
const notes = [
  `Layout: ${meta.layout}. Distances on the map are approximate; neighbors and similarities are exact, computed from the full vectors.`,
  ...meta.notes,
];
if (meta.skipped.length) {
  byId("skipped").hidden = false;
  byId("skipped").querySelector("summary").textContent = `${counted(meta.skipped.length, "file")} could not be read`;
  byId("skipped").querySelector("ul").append(...meta.skipped.map(([name, why]) => make("li", "", `${name}: ${why}`)));
}
byId("notes").append(...notes.map((text) => make("li", "", text)));
byId("pictures").hidden = !thumbs.there;
