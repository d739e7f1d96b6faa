// Mouse, touch and keyboard on the map.

const surface = map.over, touching = new Map(); // pointer id -> last position
let lassoOn = false, press = null; // press: where a drag started, and whether it has moved

const placeOf = (event) => {
  const box = surface.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

function setLasso(on) {
  lassoOn = on;
  byId("lasso").setAttribute("aria-pressed", String(on));
  surface.classList.toggle("lasso", on);
  if (on) announce("lasso: draw around images");
}

surface.addEventListener("pointerdown", (event) => {
  if (event.button > 1) return;
  const at = placeOf(event);
  surface.setPointerCapture(event.pointerId);
  touching.set(event.pointerId, at);
  map.land();
  if (touching.size > 1) { press = null; map.marks.lasso = null; map.schedule(false); return; }
  press = { at, moved: false, lasso: lassoOn || event.shiftKey, adds: event.shiftKey };
  if (press.lasso) map.marks.lasso = [map.toMap(...at)];
});

surface.addEventListener("pointermove", (event) => {
  const at = placeOf(event), before = touching.get(event.pointerId);
  if (!before) {
    if (event.pointerType === "mouse") hover(at);
    return;
  }
  if (touching.size === 2) {
    const other = [...touching].find(([id]) => id !== event.pointerId)[1];
    const reach = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]), middle = [(at[0] + other[0]) / 2, (at[1] + other[1]) / 2];
    map.pan((at[0] - before[0]) / 2, (at[1] - before[1]) / 2);
    map.zoom(reach(at, other) / Math.max(1, reach(before, other)), ...middle);
  } else if (press) {
    press.moved ||= Math.hypot(at[0] - press.at[0], at[1] - press.at[1]) > 4;
    if (press.moved) mark(-1);
    if (press.lasso) {
      map.marks.lasso.push(map.toMap(...at));
      map.schedule(false);
    } else if (press.moved) {
      surface.classList.add("dragging");
      map.pan(at[0] - before[0], at[1] - before[1]);
    }
  }
  touching.set(event.pointerId, at);
});

function release(event, whole) {
  const done = press, polygon = map.marks.lasso;
  touching.delete(event.pointerId);
  press = null;
  map.marks.lasso = null;
  surface.classList.remove("dragging");
  map.schedule(false);
  if (!done || !whole) return;
  if (!done.moved) {
    const i = map.hit(...placeOf(event), event.pointerType === "touch" ? 28 : 14);
    if (i >= 0) pick(i); else unpick();
  } else if (done.lasso) {
    const found = map.inside(polygon);
    if (found.length) select(done.adds ? [...selection, ...found] : found); else announce("no image in the lasso");
  }
}

surface.addEventListener("pointerup", (event) => release(event, true));
surface.addEventListener("pointercancel", (event) => release(event, false));
surface.addEventListener("pointerleave", () => { if (!touching.size) { mark(-1); surface.classList.remove("over"); } });

function hover(at) {
  const i = map.hit(...at, 14);
  surface.classList.toggle("over", i >= 0);
  if (i !== map.marks.hovered) mark(i);
}

surface.addEventListener("wheel", (event) => {
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
  map.zoom(Math.exp(-Math.max(-300, Math.min(300, event.deltaY * lines)) * (event.ctrlKey ? 0.01 : 0.002)), ...placeOf(event));
  mark(-1);
}, { passive: false });

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Highlights the image nearest to the middle of the map, and announces it. */
function highlightMiddle() {
  const [width, height] = map.size(), i = map.hit(width / 2, height / 2, Math.max(width, height));
  highlight(i);
}

function highlight(i) {
  mark(i);
  if (i >= 0) announce(`${names[i]}. ${facts(i)}`);
}

const KEYS = {
  "+": () => map.zoom(1.5), "=": () => map.zoom(1.5), "-": () => map.zoom(1 / 1.5), _: () => map.zoom(1 / 1.5), 0: map.home,
  Enter: () => { if (map.marks.hovered >= 0) pick(map.marks.hovered); },
  s: () => {
    const i = map.marks.hovered;
    if (i >= 0) select(selection.includes(i) ? selection.filter((j) => j !== i) : [...selection, i], false);
  },
};

surface.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const arrow = ARROWS[event.key], i = map.marks.hovered;
  if (arrow && event.shiftKey && i >= 0) {
    const next = map.nextTo(i, ...arrow);
    if (next >= 0) { map.reveal(next); highlight(next); }
  } else if (arrow) {
    map.pan(-arrow[0] * 60, -arrow[1] * 60);
    highlightMiddle();
  } else if (KEYS[event.key] || KEYS[event.key.toLowerCase()]) {
    (KEYS[event.key] || KEYS[event.key.toLowerCase()])();
    if (/[-+=_]/.test(event.key)) highlightMiddle();
  } else return;
  event.preventDefault();
});
surface.addEventListener("focus", () => { if (surface.matches(":focus-visible") && map.marks.hovered < 0) highlightMiddle(); });
surface.addEventListener("blur", () => mark(-1));

addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select");
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z" && !typing) { event.preventDefault(); groups.undo(); }
  if (event.key === "Escape") { if (lassoOn) setLasso(false); else if (selection.length) { select([]); surface.focus(); } else unpick(); }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") { event.preventDefault(); byId("find").focus(); }
  if (event.key.toLowerCase() === "l") setLasso(!lassoOn);
  if (event.key.toLowerCase() === "i" && thumbs.there) byId("pictures").click();
});

byId("lasso").addEventListener("click", () => setLasso(!lassoOn));
byId("pictures").addEventListener("click", () => {
  map.marks.pictured = !map.marks.pictured;
  byId("pictures").setAttribute("aria-pressed", String(map.marks.pictured));
  map.schedule(false);
});
byId("closer").addEventListener("click", () => map.zoom(1.5));
byId("farther").addEventListener("click", () => map.zoom(1 / 1.5));
byId("whole").addEventListener("click", map.home);

map.resize();
byId("color").value = mode;
recolor();
drawGroups();
map.paint();

/** For tests: where an image is on the screen, and what is shown. */
window.explore = { where: map.where, names, marks: map.marks, selection: () => selection, groups };
