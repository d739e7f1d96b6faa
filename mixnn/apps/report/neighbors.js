// The grid: queries with their nearest training images. A false neighbor is crossed out, has a dashed frame, and its class is named.

function neighbor(g, index, cos, isFalse, size) {
  const image = tile(g, index, size);
  if (isFalse) image.append(s("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, s("line", { x1: 0, y1: 10, x2: 10, y2: 0 })));
  const label = isFalse ? `✗ ${className(g, index)}` : "";
  return h("figure", { class: isFalse ? "false" : "true", title: describe(g, index), style: size ? { width: `${size}px` } : {} }, image,
    h("figcaption", {}, cos.toFixed(2)), isFalse && h("figcaption", {}, label));
}

function drawNeighbors() {
  const groups = DATA.galleries.map((_, g) => RUNS.filter((run) => run.embedding && run.embedding.gallery === g));
  section("neighbors", groups.flatMap((runs, g) => runs.length ? gridOf(g, runs) : []));
}

function gridOf(g, runs) {
  const gallery = DATA.galleries[g];
  if (!gallery.rows.length || !runs[0].embedding.grid[0].length) return [];
  const among = gallery.bank < gallery.bankTotal ? `${count(gallery.bank)} of ${count(gallery.bankTotal)}` : `all ${count(gallery.bankTotal)}`;
  const marks = gallery.classes.length ? " False neighbors, those of another class, are crossed out and have a dashed frame; ✗ names their class." : "";
  const own = gallery.split === "training" ? " The query itself is left out." : "";
  const note = `${gallery.split === "test" ? "Test" : "Training"} images with their nearest neighbors among ${among} training images. The number below a neighbor is the cosine similarity of the features.${own}${marks}`;
  const shares = runs.filter((run) => run.embedding.falseShare !== null).map((run) =>
    h("li", {}, MANY && letter(run), `${percent(100 * run.embedding.falseShare)}% of the ${run.embedding.grid[0].length} nearest neighbors are false, over all ${count(gallery.count)} images on the map (checkpoint of step ${count(run.embedding.step)})`));
  let title = "";
  const rows = gallery.rows.flatMap((row, r) => {
    const head = row.title !== title ? [h("h3", {}, row.title)] : [];
    title = row.title;
    return [...head, gridRow(g, runs, row, r)];
  });
  return [h("p", { class: "note" }, note), shares.length ? h("ul", { class: "legend" }, shares) : null, h("div", { class: runs.length > 1 ? "rows" : "rows alone" }, rows)];
}

function gridRow(g, runs, row, r) {
  const label = className(g, row.query), { names } = DATA.galleries[g];
  const query = h("figure", { title: describe(g, row.query) }, tile(g, row.query), h("figcaption", {}, label || (names ? names[row.query].split("/").at(-1) : "query")));
  const lists = runs.map((run) => h("div", { class: "list" }, runs.length > 1 && letter(run),
    h("div", { class: "eight" }, run.embedding.grid[r].map((one) => neighbor(g, one.tile, one.cos, one.false)))));
  return h("div", { class: "row" }, h("div", { class: "query" }, query), h("div", { class: "lists" }, lists));
}
