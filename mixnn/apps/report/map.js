// The map: t-SNE of the images, one plane per run. Hovering shows an image, choosing it also its nearest images in each run.

const TEN = ["#4e79a7", "#f28e2b", "#e15759", "#4fa9a3", "#59a14f", "#d0a91c", "#b07aa1", "#f07f90", "#9c755f", "#8c8c8c"];
const classColor = (label, total) => label < 0 || !total ? "var(--run0)" : total <= 10 ? TEN[label] : `hsl(${(label * 137.508) % 360} 60% 52%)`;

function drawMap() {
  const groups = DATA.galleries.map((_, g) => RUNS.filter((run) => run.embedding && run.embedding.gallery === g && run.embedding.xy));
  section("map", groups.flatMap((runs, g) => runs.length ? mapOf(g, runs) : []));
}

function mapOf(g, runs) {
  const gallery = DATA.galleries[g];
  const interesting = gallery.rows.find((row) => row.title !== gallery.rows[0].title) || gallery.rows[0];
  const state = { hover: -1, chosen: interesting ? interesting.query : -1, only: -1, images: false };
  const planes = runs.map((run) => plane(g, run, state, refresh));
  const detail = h("div", { class: "card detail", "aria-live": "polite" });
  let shown = null;
  function refresh() {
    planes.forEach((one) => one.update());
    if (shown !== state.chosen) showDetail(detail, g, runs, state.chosen);
    shown = state.chosen;
  }
  const of = gallery.count < gallery.total ? `${count(gallery.count)} of ${count(gallery.total)}` : `all ${count(gallery.total)}`;
  const note = `t-SNE of the encoder's features (unit length) for ${of} ${gallery.split} images, with a fixed seed` +
    `${runs.length > 1 ? "; the maps are rotated and mirrored to match" : ""}. t-SNE keeps neighborhoods, not distances: the sizes of clusters and gaps mean little. ` +
    "Hover over a point to see its image; click it, or focus the map and use the arrow keys and Enter, to see its nearest images.";
  refresh();
  const figures = planes.map((one, i) => h("div", {}, MANY && runName(runs[i]), one.node));
  return [h("p", { class: "note" }, note), controls(gallery, state, refresh),
    h("div", { class: runs.length > 1 ? "maps" : "maps alone" }, figures, runs.length > 1 ? null : detail),
    runs.length > 1 ? h("div", { style: { "margin-top": "14px" } }, detail) : null];
}

function controls(gallery, state, refresh) {
  const box = h("div", { class: "controls" });
  const images = h("button", { type: "button", "aria-pressed": "false", onclick: () => {
    state.images = !state.images;
    images.setAttribute("aria-pressed", String(state.images));
    refresh();
  } }, "show images");
  box.append(images);
  const shown = gallery.labels.slice(0, gallery.count);
  const present = gallery.classes.map((name, label) => ({ name, label, size: shown.filter((l) => l === label).length })).filter((one) => one.size);
  if (present.length > 20) {
    const select = h("select", { "aria-label": "class", onchange: () => { state.only = Number(select.value); refresh(); } },
      h("option", { value: -1 }, "all classes"), present.map(({ name, label, size }) => h("option", { value: label }, `${name} (${size})`)));
    box.append(select);
    return box;
  }
  const buttons = present.map(({ name, label, size }) => h("button", { type: "button", "aria-pressed": "false", title: `${size} image${size === 1 ? "" : "s"}; click to show only this class`, onclick: () => {
    state.only = state.only === label ? -1 : label;
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(present[i].label === state.only)));
    refresh();
  } }, h("span", { class: "swatch", style: { background: classColor(label, gallery.classes.length) } }), name));
  box.append(...buttons);
  return box;
}

function mosaic(points) {
  // Puts each image into the nearest free cell of a grid, so that none hides another; returns [cells per side, centers].
  const side = Math.ceil(1.35 * Math.sqrt(points.length)), step = 1000 / side, taken = new Set();
  const centers = points.map(([x, y]) => {
    let best = -1, least = Infinity;
    for (let cell = 0; cell < side * side; cell += 1) {
      const d = ((cell % side + 0.5) * step - x) ** 2 + ((Math.floor(cell / side) + 0.5) * step - y) ** 2;
      if (d < least && !taken.has(cell)) [best, least] = [cell, d];
    }
    taken.add(best);
    return [(best % side + 0.5) * step, (Math.floor(best / side) + 0.5) * step];
  });
  return [side, centers];
}

function plane(g, run, state, refresh) {
  const gallery = DATA.galleries[g], { xy, near } = run.embedding;
  const dotted = xy.map(([x, y]) => [40 + 0.92 * x, 40 + 0.92 * y]);
  let tiled = null;
  const place = (i) => (state.images && tiled ? tiled[i] : dotted[i]);
  const total = gallery.classes.length;
  const dots = xy.map((_, i) => s("circle", { class: "dot", cx: place(i)[0], cy: place(i)[1], r: 8.5, style: { fill: classColor(gallery.labels[i], total) } }));
  const links = s("g"), ring = s("circle", { class: "chosen", r: 15, visibility: "hidden" });
  const svg = s("svg", { viewBox: "0 0 1000 1000", "aria-hidden": "true" }, links, dots, ring);
  const node = h("div", { class: "plane", tabindex: 0, role: "slider", "aria-label": `map of ${gallery.count} images`, "aria-valuemin": 1, "aria-valuemax": gallery.count, "aria-valuenow": 1 }, svg);
  let tiles = null;

  function update() {
    if (state.images && !tiles) {
      const [side, centers] = mosaic(dotted);
      tiled = centers;
      tiles = xy.map((_, i) => tile(g, i));
      tiles.forEach((one, i) => {
        const [x, y] = tiled[i], style = { left: `${x / 10}%`, top: `${y / 10}%`, width: `${95 / side}%`, height: `${95 / side}%`, "outline-color": classColor(gallery.labels[i], total) };
        fill(one, { style, class: `${one.className}${total ? " framed" : ""}` }, []);
      });
      svg.before(...tiles);
    }
    const dim = (i) => state.only >= 0 && gallery.labels[i] !== state.only;
    dots.forEach((dot, i) => { dot.classList.toggle("dim", dim(i)); dot.setAttribute("visibility", state.images ? "hidden" : "visible"); });
    (tiles || []).forEach((one, i) => { one.classList.toggle("dim", dim(i)); one.hidden = !state.images; });
    const marked = state.hover >= 0 ? state.hover : state.chosen;
    fill(ring, marked < 0 ? { visibility: "hidden" } : { visibility: "visible", cx: place(marked)[0], cy: place(marked)[1] }, []);
    links.replaceChildren(...(marked < 0 ? [] : near[marked].map((j) => s("line", { class: "link", x1: place(marked)[0], y1: place(marked)[1], x2: place(j)[0], y2: place(j)[1] }))));
    if (marked >= 0) fill(node, { "aria-valuenow": marked + 1, "aria-valuetext": describe(g, marked) }, []);
  }
  function nearest(event) {
    const box = node.getBoundingClientRect();
    const [x, y] = [((event.clientX - box.left) / box.width) * 1000, ((event.clientY - box.top) / box.height) * 1000];
    const reach = (26 / box.width) * 1000;
    let found = -1, least = reach * reach;
    xy.forEach((_, i) => {
      if (state.only >= 0 && gallery.labels[i] !== state.only) return;
      const [a, b] = place(i), d = (a - x) ** 2 + (b - y) ** 2;
      if (d < least) [found, least] = [i, d];
    });
    return found;
  }
  function hover(i) {
    state.hover = i;
    refresh();
    if (i < 0) return hideTip();
    const box = node.getBoundingClientRect(), [x, y] = place(i);
    return showTip(box.left + (x / 1000) * box.width, box.top + (y / 1000) * box.height, tile(g, i, 96), h("div", {}, describe(g, i)));
  }
  const choose = (i) => { state.chosen = i; refresh(); };
  node.addEventListener("pointermove", (event) => hover(nearest(event)));
  node.addEventListener("pointerleave", () => hover(-1));
  node.addEventListener("blur", () => hover(-1));
  node.addEventListener("click", (event) => { hover(nearest(event)); choose(state.hover); });
  node.addEventListener("keydown", (event) => {
    const now = state.hover >= 0 ? state.hover : Math.max(0, state.chosen);
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (way) hover(toward(now, way));
    else if (event.key === "Home") hover(0);
    else if (event.key === "End") hover(xy.length - 1);
    else if (event.key === "Enter" || event.key === " ") choose(now);
    else if (event.key === "Escape") { choose(-1); hover(-1); }
    else return;
    event.preventDefault();
  });
  function toward(from, [dx, dy]) {
    // The nearest image within 45 degrees of that direction.
    let found = from, least = Infinity;
    xy.forEach((_, i) => {
      const [x, y] = [xy[i][0] - xy[from][0], xy[i][1] - xy[from][1]];
      const along = x * dx + y * dy, across = Math.abs(x * dy) + Math.abs(y * dx);
      if (along > 0 && across <= along && along + across < least) [found, least] = [i, along + across];
    });
    return found;
  }
  return { node, update };
}

function showDetail(node, g, runs, i) {
  if (i < 0) return node.replaceChildren(h("p", { class: "muted" }, "No image chosen."));
  const gallery = DATA.galleries[g], label = className(g, i);
  const lists = runs.map((run) => h("div", {},
    h("p", { class: "note" }, MANY && [letter(run), " "], "nearest images on the map, with the cosine similarity of their features", gallery.classes.length ? "; crossed out: another class" : ""),
    h("div", { class: "strip" }, run.embedding.near[i].map((j, n) => neighbor(g, j, run.embedding.nearCos[i][n], label && className(g, j) && className(g, j) !== label, 56)))));
  return node.replaceChildren(h("div", { class: "about" }, tile(g, i, 96), h("div", {}, h("b", {}, describe(g, i)))), h("div", { class: "strips" }, lists));
}
