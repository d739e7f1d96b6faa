// Helpers for elements, numbers, thumbnails and the tooltip. Text enters as text: nothing here parses HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs, MANY = RUNS.length > 1;
const DASHES = ["", "7 4", "2 3.5", "9 3 2 3"];
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);
const runColor = (run) => `var(--run${RUNS.indexOf(run) % 8})`;
const runDash = (run) => DASHES[RUNS.indexOf(run) % 4];

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") Object.entries(value).forEach(([key, v]) => node.style.setProperty(key, v));
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function section(id, ...children) {
  const node = byId(id);
  const content = children.flat().filter(Boolean);
  if (content.length) node.append(...content);
  else node.remove();
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size < 0.001) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}
const percent = (value) => value.toFixed(value === Math.round(value * 10) / 10 ? 1 : 2);
const count = (value) => value.toLocaleString("en");

const letter = (run) => h("span", { class: "letter", style: { background: runColor(run) } }, run.letter);
const runName = (run) => h("p", { class: "runname" }, MANY && letter(run), h("span", {}, run.name));

function table(head, rows, className) {
  const cell = (tag, value) => value instanceof Node ? value : h(tag, {}, value);
  return h("div", { class: "scroll" }, h("table", { class: className },
    head && h("thead", {}, h("tr", {}, head.map((v) => v instanceof Node ? v : h("th", { scope: "col" }, v)))),
    h("tbody", {}, rows.map((row) => row instanceof Node ? row : h("tr", {}, row.map((v, i) => i ? cell("td", v) : v instanceof Node ? v : h("th", { scope: "row" }, v)))))));
}

// One sprite per data set holds its thumbnails; a CSS rule refers to it, so that it is stored once.
const sheet = new CSSStyleSheet();
DATA.galleries.forEach((gallery, g) => sheet.insertRule(`.sprite${g} { background-image: url("${gallery.sprite}"); }`));
document.adoptedStyleSheets = [sheet];

function tile(g, index, size) {
  // Without a size the tile fills its box: percentages of the sprite instead of pixels.
  const { columns, side, labels } = DATA.galleries[g];
  const lines = Math.ceil(labels.length / columns), x = index % columns, y = Math.floor(index / columns);
  const share = (i, n) => (n > 1 ? `${(100 * i) / (n - 1)}%` : "0%");
  const style = {
    "background-size": `${100 * columns}% ${100 * lines}%`,
    "background-position": `${share(x, columns)} ${share(y, lines)}`,
  };
  if (size) Object.assign(style, { width: `${size}px`, height: `${size}px` });
  const sharp = side < 24 ? " pixels" : "";
  return h("div", { class: `tile sprite${g}${sharp}`, role: "img", "aria-label": describe(g, index), style });
}

function className(g, index) {
  const { classes, labels } = DATA.galleries[g];
  return labels[index] >= 0 && classes.length ? classes[labels[index]] : "";
}
function describe(g, index) {
  const { names, split, count: shown } = DATA.galleries[g];
  const which = index < shown ? `${split} image` : "training image";
  const label = className(g, index);
  return [names ? names[index] : which, label && `class ${label}`].filter(Boolean).join(", ");
}

const tip = byId("tip");
function showTip(x, y, ...children) {
  tip.replaceChildren(...children);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
  const top = y + 14 + height > innerHeight ? y - 14 - height : y + 14;
  tip.style.left = `${Math.max(4, Math.min(left, innerWidth - width - 4))}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}
function hideTip() { tip.hidden = true; }
addEventListener("scroll", hideTip, { passive: true });
