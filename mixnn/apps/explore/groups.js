// Named groups of images: made from a selection, with undo, kept in local storage, saved as a CSV of file,label.

const groups = (() => {
  let titles = [], of = new Uint16Array(N), past = [], unsaved = false, kept = true;
  const place = `mixnn-explore-${meta.key}`, listeners = [];

  function changed() {
    try {
      const text = JSON.stringify(titles.map((title, g) => [title, members(g)]));
      if (titles.length) localStorage.setItem(place, text); else localStorage.removeItem(place);
      kept = !meta.served; // the server will have another port next time
    } catch { kept = false; }
    for (const listener of listeners) listener();
  }

  function remember() {
    past.push([titles.slice(), of.slice()]);
    if (past.length > 100) past.shift();
    unsaved = true;
  }

  function members(g) {
    const found = [];
    for (let i = 0; i < N; i++) if (of[i] === g + 1) found.push(i);
    return found;
  }

  function dropEmpty() {
    const sizes = new Uint32Array(titles.length + 1), number = new Uint16Array(titles.length + 1);
    for (let i = 0; i < N; i++) sizes[of[i]]++;
    const left = titles.filter((_, g) => sizes[g + 1]);
    titles.forEach((title, g) => { number[g + 1] = left.indexOf(title) + 1; });
    of = of.map((g) => number[g]);
    titles = left;
  }

  /** Puts images into the group of this title, and out of any other; the title "" removes them from their groups. */
  function assign(images, title) {
    const name = title.trim();
    if (!images.length) return;
    remember();
    if (name && !titles.includes(name)) titles.push(name);
    for (const i of images) of[i] = titles.indexOf(name) + 1;
    dropEmpty();
    changed();
  }

  function clear() {
    if (!titles.length) return;
    remember();
    titles = [];
    of = new Uint16Array(N);
    changed();
  }

  function undo() {
    if (!past.length) return;
    [titles, of] = past.pop();
    unsaved = true;
    changed();
  }

  const quoted = (text) => /[",\r\n]/.test(text) || text.trim() !== text ? `"${text.replaceAll('"', '""')}"` : text;

  function csv() {
    const lines = ["file,label"];
    for (let i = 0; i < N; i++) if (of[i]) lines.push(`${quoted(names[i])},${quoted(titles[of[i] - 1])}`);
    return lines.join("\r\n") + "\r\n";
  }

  function save() {
    const link = document.createElement("a"), address = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.href = address;
    link.download = "labels.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
    unsaved = false;
  }

  try {
    for (const [title, images] of JSON.parse(localStorage.getItem(place) || "[]")) {
      titles.push(String(title));
      for (const i of images) if (i < N) of[i] = titles.length;
    }
    dropEmpty();
  } catch { titles = []; of.fill(0); }
  addEventListener("beforeunload", (event) => { if (unsaved && !kept && titles.length) event.preventDefault(); });
  return {
    assign, clear, undo, csv, save, members, titles: () => titles, of: (i) => of[i], canUndo: () => past.length > 0,
    onChange: (listener) => listeners.push(listener),
  };
})();
