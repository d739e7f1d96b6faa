// The data in the page: JSON blocks for facts and names, base64 blocks for numbers.

const byId = (id) => document.getElementById(id);
const meta = JSON.parse(byId("data-meta").textContent);
const names = JSON.parse(byId("data-names").textContent);
const N = meta.count, K = meta.neighbors;
const TYPES = { f4: Float32Array, u2: Uint16Array, u4: Uint32Array };
const NONE = 65535; // label number of an image without a label

function bytesOf(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

function numbers(id) {
  const block = byId(`data-${id}`);
  return new TYPES[block.dataset.type](bytesOf(block.textContent).buffer);
}

const points = numbers("points"), neighbors = numbers("neighbors"), cosines = numbers("cosines");
const labels = numbers("labels"), clusters = numbers("clusters"), slots = numbers("slots");
const labeled = labels.reduce((count, label) => count + (label !== NONE), 0), hasLabels = labeled > 0;
const predicted = meta.predicted ? numbers("predicted") : labels.map(() => NONE); // by `mixnn classify`
const confidences = meta.predicted ? numbers("confidences") : new Float32Array(N).fill(-1);
const cosine = (i, k) => cosines[i * K + k] / 65535 * 2 - 1;
const labelOf = (i) => labels[i] === NONE ? "" : meta.classes[labels[i]];
const predictedOf = (i) => predicted[i] === NONE ? "" : meta.classes[predicted[i]];
const isFalse = (i, j) => labels[i] !== NONE && labels[j] !== NONE && labels[i] !== labels[j];
const counted = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;

/** Share of an image's labeled neighbors with its own label; -1 if unknown. */
const purity = new Float32Array(N);
let pairs = 0, alike = 0; // of all images
for (let i = 0; i < N; i++) {
  let known = 0, same = 0;
  for (let k = 0; k < K; k++) {
    const other = labels[neighbors[i * K + k]];
    if (labels[i] !== NONE && other !== NONE) { known++; same += other === labels[i]; }
  }
  purity[i] = known ? same / known : -1;
  pairs += known; alike += same;
}

/** The images in random order, since what is drawn last is on top. */
const shuffled = new Uint32Array(N).map((_, i) => i);
for (let i = N - 1, state = 1; i > 0; i--) {
  state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
  const j = Math.floor(state / 4294967296 * (i + 1)), kept = shuffled[i];
  shuffled[i] = shuffled[j];
  shuffled[j] = kept;
}

/** A grid over the map with the points of each cell, to find the nearest point without comparing all. */
const grid = (() => {
  const side = Math.max(1, Math.ceil(Math.sqrt(N / 4))), cell = new Uint32Array(N);
  const at = (v) => Math.min(side - 1, Math.max(0, Math.floor((v + 1) / 2 * side)));
  const first = new Uint32Array(side * side + 1), items = new Uint32Array(N);
  for (let i = 0; i < N; i++) first[(cell[i] = at(points[2 * i + 1]) * side + at(points[2 * i])) + 1]++;
  for (let c = 0; c < side * side; c++) first[c + 1] += first[c];
  const next = first.slice();
  for (let i = 0; i < N; i++) items[next[cell[i]]++] = i;

  /** Calls visit(i) for all points whose cells touch a box. */
  function within(x0, y0, x1, y1, visit) {
    for (let row = at(y0); row <= at(y1); row++) {
      for (let c = row * side + at(x0); c <= row * side + at(x1); c++) {
        for (let k = first[c]; k < first[c + 1]; k++) visit(items[k]);
      }
    }
  }

  /** The point nearest to (x, y) within a radius; -1 if there is none. */
  function nearest(x, y, radius) {
    let best = -1, least = radius * radius;
    within(x - radius, y - radius, x + radius, y + radius, (i) => {
      const dx = points[2 * i] - x, dy = points[2 * i + 1] - y, d = dx * dx + dy * dy;
      if (d <= least) { least = d; best = i; }
    });
    return best;
  }
  return { within, nearest };
})();
