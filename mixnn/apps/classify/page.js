// Labels for the images on the page: typed below each, kept in local storage, saved as a CSV of file,label.
"use strict";
{
  const data = JSON.parse(document.getElementById("data").textContent);
  const inputs = [...document.querySelectorAll(".tile input")], save = document.getElementById("save");
  const known = document.getElementById("known"), count = document.getElementById("count");
  const place = `mixnn-labels-${data.key}`;
  const label = (i) => (inputs[i] ? inputs[i].value.trim() : "");

  function stored() {
    try { return new Map(JSON.parse(localStorage.getItem(place) || "[]")); } catch { return new Map(); }
  }

  /** Labels of images on other pages of the same folder stay in the store. */
  function keep() {
    const labels = stored();
    data.names.forEach((name, i) => { if (label(i)) labels.set(name, label(i)); else labels.delete(name); });
    try { localStorage.setItem(place, JSON.stringify([...labels])); } catch { /* then they last as long as the page */ }
  }

  function show() {
    const filled = inputs.filter((_, i) => label(i)).length;
    inputs.forEach((input, i) => input.closest(".tile").classList.toggle("labeled", label(i) !== ""));
    count.textContent = `${filled} of ${data.names.length} labeled`;
    save.disabled = !filled;
  }

  /** Offers all labels used so far in every field. */
  function offer() {
    const used = new Set([...data.labels.map(([, text]) => text), ...inputs.map((_, i) => label(i))]);
    used.delete("");
    known.replaceChildren(...[...used].sort().map((text) => new Option(text)));
  }

  const quoted = (text) => (/[",;\t\r\n]/.test(text) || text.trim() !== text ? `"${text.replaceAll('"', '""')}"` : text);

  function csv() {
    const rows = [["file", "label"], ...data.names.map((name, i) => [name, label(i)]), ...data.labels];
    return rows.map((row) => row.map(quoted).join(",") + "\r\n").join("");
  }

  save.addEventListener("click", () => {
    const link = document.createElement("a"), address = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.href = address;
    link.download = data.file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  });
  const before = stored();
  inputs.forEach((input, i) => {
    input.value = before.get(data.names[i]) || "";
    input.addEventListener("input", () => { keep(); show(); });
    input.addEventListener("change", offer);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) (inputs[i + 1] || save).focus();
    });
  });
  show();
  offer();
}
