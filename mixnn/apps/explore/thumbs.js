// Thumbnails: cut from the sheets in the page, or requested from the server by number. Loaded when needed; a bounded cache.

const thumbs = (() => {
  const kept = new Map(); // key -> picture, or null while it loads; least recently used first
  const MOST = meta.served ? 3000 : 32; // a sheet takes 4 MB
  const listeners = [], waiting = [], queue = [];
  let running = 0;

  const there = meta.served || meta.sheets > 0;
  const across = Math.floor(1024 / meta.side);
  const keyOf = (i) => meta.served ? i : Math.floor(slots[i] / (across * across));

  async function load(key) {
    if (meta.served) {
      const image = new Image();
      image.src = `/thumb/${key}`;
      await image.decode();
      return image;
    }
    const block = byId(`sheet${key}`);
    return createImageBitmap(new Blob([bytesOf(block.textContent)], { type: block.dataset.type }));
  }

  function pump() {
    while (running < 6 && queue.length) {
      const key = queue.pop(); // the latest request first: earlier ones may have left the view
      running++;
      load(key).catch(() => undefined).then((picture) => {
        running--;
        if (picture) kept.set(key, picture);
        for (const old of kept.keys()) {
          if (kept.size <= MOST) break;
          if (kept.get(old) && old !== key) kept.delete(old);
        }
        for (const listener of listeners) listener();
        for (const [canvas, i] of waiting.splice(0)) into(canvas, i);
        pump();
      });
    }
  }

  /** Draws a thumbnail if it is loaded, and starts loading it if not. */
  function draw(context, i, x, y, size) {
    if (!there) return false;
    const key = keyOf(i), picture = kept.get(key);
    if (picture === undefined && (meta.served || byId(`sheet${key}`))) {
      kept.set(key, null);
      queue.push(key);
      if (queue.length > 400) kept.delete(queue.shift());
      pump();
    }
    if (!picture) return false;
    kept.delete(key);
    kept.set(key, picture);
    const side = meta.served ? picture.naturalWidth : meta.side, slot = meta.served ? 0 : slots[i] % (across * across);
    context.imageSmoothingEnabled = size < 3 * side;
    const left = slot % across * side, top = Math.floor(slot / across) * side;
    context.drawImage(picture, meta.served ? 0 : left, meta.served ? 0 : top, side, side, x, y, size, size);
    return true;
  }

  /** Fills a small canvas with a thumbnail, now or when it is loaded. */
  function into(canvas, i) {
    if (canvas.dataset.image !== String(i)) return;
    if (!draw(canvas.getContext("2d"), i, 0, 0, canvas.width) && there) waiting.push([canvas, i]);
  }

  function show(canvas, i) {
    canvas.hidden = !there;
    if (canvas.dataset.image === String(i)) return;
    canvas.dataset.image = String(i);
    canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
    into(canvas, i);
  }

  /** The sheets are at the end of the page, so the map is shown before they are parsed. */
  document.addEventListener("DOMContentLoaded", () => {
    for (const listener of listeners) listener();
    for (const [canvas, i] of waiting.splice(0)) into(canvas, i);
  });
  return { there, draw, show, onLoad: (listener) => listeners.push(listener) };
})();
