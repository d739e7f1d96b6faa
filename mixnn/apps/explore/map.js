// The map: points on one canvas; highlights, thumbnails and the lasso on a second one above it.

const map = (() => {
  const box = byId("map"), base = byId("points"), over = byId("overlay");
  const paper = base.getContext("2d", { alpha: false, willReadFrequently: true }), pen = over.getContext("2d");
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const MOST_PIXELS = 3e6; // repainted in every frame: a large screen gets coarser points, not a slower map
  const MOST_PICTURED = 600; // points in view up to which thumbnails are drawn
  const marks = { hovered: -1, picked: -1, lasso: null, tags: [], pictured: true }; // drawn above the points
  const selected = new Uint8Array(N);
  let colors = new Uint32Array(N), faded = new Uint32Array(N), background = 0xffffffff, theme = {};
  const framed = new Map(); // image -> half the side of its thumbnail on the map
  let width = 1, height = 1, ratio = 1, grain = 1, image = null, pixels = null, anySelected = false;
  let view = { x: 0, y: 0, scale: 1 }, whole = view, flight = 0, due = 0, dirty = false;

  const low = [Infinity, Infinity], high = [-Infinity, -Infinity];
  for (let i = 0; i < 2 * N; i++) {
    low[i % 2] = Math.min(low[i % 2], points[i]);
    high[i % 2] = Math.max(high[i % 2], points[i]);
  }

  const toScreen = (x, y) => [(x - view.x) * view.scale + width / 2, (y - view.y) * view.scale + height / 2];
  const toMap = (x, y) => [(x - width / 2) / view.scale + view.x, (y - height / 2) / view.scale + view.y];
  const where = (i) => toScreen(points[2 * i], points[2 * i + 1]);

  function resize() {
    const untouched = view === whole;
    width = Math.max(1, box.clientWidth);
    height = Math.max(1, box.clientHeight);
    ratio = Math.min(2, window.devicePixelRatio || 1);
    grain = Math.min(ratio, Math.max(1, Math.sqrt(MOST_PIXELS / (width * height)))); // of the points
    for (const [canvas, fine] of [[base, grain], [over, ratio]]) {
      canvas.width = Math.round(width * fine);
      canvas.height = Math.round(height * fine);
    }
    image = paper.createImageData(base.width, base.height);
    pixels = new Uint32Array(image.data.buffer);
    const spans = [Math.max(high[0] - low[0], 0.05), Math.max(high[1] - low[1], 0.05)];
    const scale = 0.9 * Math.min(width / spans[0], Math.max(height - 64, 40) / spans[1]); // 64: the tools
    whole = { x: (low[0] + high[0]) / 2, y: (low[1] + high[1]) / 2 - 22 / scale, scale };
    if (untouched) view = whole;
    paint();
  }

  // Drawing happens once per frame, however often it is scheduled; highlights do not repaint the points.

  function schedule(all = true) {
    dirty ||= all;
    due ||= requestAnimationFrame(paint);
  }

  function paint() {
    cancelAnimationFrame(due);
    due = 0;
    if (dirty) paintPoints();
    dirty = false;
    paintMarks();
  }

  const zoomed = () => view.scale / whole.scale;
  const radius = () => Math.min(4, Math.max(1.3, 0.16 * Math.sqrt(width * height / N))) * Math.min(2.2, Math.max(1, zoomed() ** 0.35));

  /** A disc as pixel offsets, with the coverage of each pixel (0 to 256). */
  function stamp(r, stride) {
    const reach = Math.ceil(r + 0.5), offsets = [], covers = [];
    for (let y = -reach; y <= reach; y++) {
      for (let x = -reach; x <= reach; x++) {
        const cover = Math.round(256 * Math.min(1, Math.max(0, r + 0.5 - Math.hypot(x, y))));
        if (cover) { offsets.push(y * stride + x); covers.push(cover); }
      }
    }
    return { reach, offsets: Int32Array.from(offsets), covers: Uint16Array.from(covers) };
  }

  function paintPoints() {
    const w = base.width, h = base.height, scale = view.scale * grain;
    const left = w / 2 - view.x * scale, top = h / 2 - view.y * scale;
    const { reach, offsets, covers } = stamp(radius() * grain, w), size = offsets.length;
    pixels.fill(background);
    for (let pass = anySelected ? 0 : 1; pass < 2; pass++) {
      const ink = pass ? colors : faded;
      for (let n = 0; n < N; n++) {
        const i = shuffled[n];
        if (anySelected && selected[i] !== pass) continue;
        const x = Math.round(points[2 * i] * scale + left), y = Math.round(points[2 * i + 1] * scale + top);
        if (x < reach || y < reach || x >= w - reach || y >= h - reach) continue;
        const color = ink[i], rb = color & 0xff00ff, g = color & 0xff00, at = y * w + x;
        for (let k = 0; k < size; k++) {
          const cover = covers[k], p = at + offsets[k];
          if (cover === 256) { pixels[p] = color; continue; }
          const under = pixels[p], rest = 256 - cover;
          const mixed = ((((under & 0xff00ff) * rest + rb * cover) >>> 8) & 0xff00ff)
            | ((((under & 0xff00) * rest + g * cover) >>> 8) & 0xff00);
          pixels[p] = (mixed | 0xff000000) >>> 0;
        }
      }
    }
    paper.putImageData(image, 0, 0);
  }

  function paintMarks() {
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    framed.clear();
    if (lost()) note("no images here; press 0 to show the whole map");
    if (marks.picked >= 0) paintLines(marks.picked);
    if (marks.pictured && thumbs.there) paintThumbs();
    if (marks.picked >= 0) paintNeighbors(marks.picked);
    paintTags();
    if (marks.hovered >= 0) ring(marks.hovered, radius() + 4, theme.ink, 2);
    if (marks.lasso) paintLasso();
  }

  function lost() {
    const [x0, y0] = toMap(0, 0), [x1, y1] = toMap(width, height);
    let some = false;
    grid.within(x0, y0, x1, y1, (i) => {
      some ||= points[2 * i] >= x0 && points[2 * i] <= x1 && points[2 * i + 1] >= y0 && points[2 * i + 1] <= y1;
    });
    return !some;
  }

  function note(text) {
    pen.font = "14px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.fillStyle = theme.ink;
    pen.fillText(text, width / 2, height / 2, width - 20);
  }

  /** Thumbnails at their points where there is room; the choice stays the same while the map moves. */
  function paintThumbs() {
    const [x0, y0] = toMap(0, 0), [x1, y1] = toMap(width, height), shown = [];
    let count = 0;
    grid.within(x0, y0, x1, y1, (i) => { if (count++ < MOST_PICTURED) shown.push(i); });
    if (count > MOST_PICTURED) return;
    const size = Math.min(64, Math.max(28, 0.5 * Math.sqrt(width * height / Math.max(1, count))));
    const taken = new Map(), cell = (v) => Math.floor(v / size);
    const first = (i) => ranks[i] - (close.has(i) ? N : 0), close = new Set([marks.picked]);
    if (marks.picked >= 0) for (let k = 0; k < K; k++) close.add(neighbors[marks.picked * K + k]);
    for (const i of shown.sort((a, b) => first(a) - first(b))) {
      const [x, y] = where(i);
      let free = true;
      for (let dx = -1; dx <= 1 && free; dx++) {
        for (let dy = -1; dy <= 1 && free; dy++) {
          const other = taken.get(`${cell(x) + dx} ${cell(y) + dy}`);
          free = !other || Math.abs(other[0] - x) >= size + 3 || Math.abs(other[1] - y) >= size + 3;
        }
      }
      if (!free) continue;
      taken.set(`${cell(x)} ${cell(y)}`, [x, y]);
      pen.globalAlpha = anySelected && !selected[i] ? 0.25 : 1;
      if (thumbs.draw(pen, i, x - size / 2, y - size / 2, size)) {
        pen.strokeStyle = css(colors[i]);
        pen.lineWidth = 2;
        pen.strokeRect(x - size / 2, y - size / 2, size, size);
        framed.set(i, size / 2);
      }
    }
    pen.globalAlpha = 1;
  }

  /** Lines from an image to its nearest neighbors, dashed to false ones. */
  function paintLines(i) {
    pen.lineWidth = 1.5;
    for (let k = 0; k < K; k++) {
      const j = neighbors[i * K + k], wrong = isFalse(i, j);
      pen.strokeStyle = wrong ? theme.warn : theme.ink;
      pen.setLineDash(wrong ? [4, 4] : []);
      pen.beginPath();
      pen.moveTo(...where(i));
      pen.lineTo(...where(j));
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  /** A ring around each neighbor and a cross on false ones, in the corner of the thumbnail if there is one. */
  function paintNeighbors(i) {
    for (let k = 0; k < K; k++) {
      const j = neighbors[i * K + k], wrong = isFalse(i, j), half = framed.get(j) || 0;
      if (!wrong || half) ring(j, radius() + 2, wrong ? theme.warn : theme.ink, 1.5);
      if (wrong) cross(j, half);
    }
    ring(i, radius() + 5, theme.accent, 3);
  }

  function cross(i, half) {
    const [x, y] = where(i), left = x + half, top = y - half;
    pen.beginPath();
    pen.moveTo(left - 5, top - 5); pen.lineTo(left + 5, top + 5);
    pen.moveTo(left + 5, top - 5); pen.lineTo(left - 5, top + 5);
    for (const [color, thick] of [[theme.map, 5], [theme.warn, 2.5]]) {
      pen.strokeStyle = color;
      pen.lineWidth = thick;
      pen.stroke();
    }
  }

  function ring(i, r, color, thick) {
    const [x, y] = where(i), half = (framed.get(i) || 0) + thick;
    pen.beginPath();
    if (framed.has(i)) pen.rect(x - half, y - half, 2 * half, 2 * half); else pen.arc(x, y, r, 0, 2 * Math.PI);
    pen.lineWidth = thick + 2;
    pen.strokeStyle = theme.map;
    pen.stroke();
    pen.lineWidth = thick;
    pen.strokeStyle = color;
    pen.stroke();
  }

  /** Class names in the middle of their images, so that nobody has to rely on colors. */
  function paintTags() {
    pen.font = "600 13px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.lineJoin = "round";
    const placed = [];
    for (const { text, x, y } of marks.tags) {
      const [left, top] = toScreen(x, y), half = pen.measureText(text).width / 2 + 4;
      if (placed.some(([l, t, h]) => Math.abs(l - left) < h + half && Math.abs(t - top) < 18)) continue;
      placed.push([left, top, half]);
      pen.strokeStyle = theme.map;
      pen.lineWidth = 4;
      pen.strokeText(text, left, top);
      pen.fillStyle = theme.ink;
      pen.fillText(text, left, top);
    }
  }

  function paintLasso() {
    pen.beginPath();
    for (const [x, y] of marks.lasso) pen.lineTo(...toScreen(x, y));
    pen.closePath();
    pen.globalAlpha = 0.12;
    pen.fillStyle = theme.accent;
    pen.fill();
    pen.globalAlpha = 1;
    pen.strokeStyle = theme.accent;
    pen.lineWidth = 2;
    pen.setLineDash([6, 4]);
    pen.stroke();
    pen.setLineDash([]);
  }

  // Moving

  function move(x, y, scale = view.scale) {
    const widest = Math.max(whole.scale * 400, 400), keep = (v, a) => Math.min(high[a], Math.max(low[a], v));
    view = { x: keep(x, 0), y: keep(y, 1), scale: Math.min(widest, Math.max(whole.scale / 2, scale)) };
    schedule();
  }

  function land() { cancelAnimationFrame(flight); flight = 0; }

  function pan(dx, dy) { land(); move(view.x - dx / view.scale, view.y - dy / view.scale); }

  function zoom(factor, x = width / 2, y = height / 2) {
    land();
    const [mx, my] = toMap(x, y), scale = Math.min(Math.max(whole.scale * 400, 400), Math.max(whole.scale / 2, view.scale * factor));
    move(mx - (x - width / 2) / scale, my - (y - height / 2) / scale, scale);
  }

  /** Animates to a view, or jumps if the user prefers reduced motion. */
  function fly(goal) {
    land();
    const from = view, start = performance.now();
    const step = (now) => {
      const t = calm.matches ? 1 : Math.min(1, (now - start) / 220), eased = t * (2 - t);
      const mix = (a, b) => a + (b - a) * eased;
      if (t === 1) { view = goal; flight = 0; return schedule(); }
      view = { x: mix(from.x, goal.x), y: mix(from.y, goal.y), scale: from.scale * (goal.scale / from.scale) ** eased };
      flight = requestAnimationFrame(step);
      return schedule();
    };
    if (calm.matches) step(start); else flight = requestAnimationFrame(step);
  }

  /** Moves the map if an image is outside the view or near its edge. */
  function reveal(i) {
    const [x, y] = where(i), edge = Math.min(70, width / 6, height / 6);
    if (x < edge || y < edge + 40 || x > width - edge || y > height - edge) {
      fly({ x: points[2 * i], y: points[2 * i + 1], scale: view.scale });
    }
  }

  const hit = (x, y, reach) => grid.nearest(...toMap(x, y), reach / view.scale);

  /** The nearest image within 45 degrees of a direction; -1 if there is none. */
  function nextTo(i, dx, dy) {
    let best = -1, least = Infinity;
    for (let j = 0; j < N; j++) {
      const x = points[2 * j] - points[2 * i], y = points[2 * j + 1] - points[2 * i + 1];
      const along = x * dx + y * dy, across = Math.abs(x * dy - y * dx), cost = along + 2 * across;
      if (j !== i && along > 0 && across <= along && cost < least) { least = cost; best = j; }
    }
    return best;
  }

  /** The images inside a polygon of map coordinates (even-odd). */
  function inside(polygon) {
    const xs = polygon.map((p) => p[0]), ys = polygon.map((p) => p[1]), found = [];
    grid.within(Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys), (i) => {
      const x = points[2 * i], y = points[2 * i + 1];
      let odd = false;
      for (let a = 0, b = polygon.length - 1; a < polygon.length; b = a++) {
        if ((ys[a] > y) !== (ys[b] > y) && x < (xs[b] - xs[a]) * (y - ys[a]) / (ys[b] - ys[a]) + xs[a]) odd = !odd;
      }
      if (odd) found.push(i);
    });
    return found;
  }

  // Setters

  const css = (c) => `rgb(${c & 255} ${(c >> 8) & 255} ${(c >> 16) & 255})`;

  function setColors(given, ground, names) {
    colors = given;
    background = ground;
    theme = names;
    faded = given.map((c) => {
      const mix = (shift) => Math.round(((c >> shift) & 255) * 0.16 + ((ground >> shift) & 255) * 0.84) << shift;
      return (0xff000000 | mix(16) | mix(8) | mix(0)) >>> 0;
    });
    schedule();
  }

  function setSelected(chosen) {
    selected.fill(0);
    for (const i of chosen) selected[i] = 1;
    anySelected = chosen.length > 0;
    schedule();
  }

  const ranks = new Uint32Array(N);
  for (let n = 0; n < N; n++) ranks[shuffled[n]] = n;
  thumbs.onLoad(() => schedule(false));
  new ResizeObserver(() => { dirty = true; resize(); }).observe(box);
  return {
    over, marks, schedule, paint, pan, zoom, land, reveal, hit, nextTo, inside, where, toMap, setColors, setSelected, css,
    resize: () => { dirty = true; resize(); }, home: () => fly(whole), size: () => [width, height],
  };
})();
