"use strict";
// Zoom: drag over the lanes. Export: each figure as an SVG file. The page is complete without scripts.
const ticks = (low, high, count) => {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
  return found;
};
const make = (name, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
};
for (const svg of document.querySelectorAll("svg.lanes")) {
  const plot = svg.querySelector(".plot"), marks = svg.querySelector(".ticks");
  const [left, top, width, height] = ["x", "y", "width", "height"].map((name) => +plot.getAttribute(name));
  const whole = plot.getAttribute("viewBox").split(" ").map(Number);
  const unit = +plot.dataset.unit;
  const reset = svg.closest("figure").querySelector(".reset");
  const show = (begin, span) => {
    plot.setAttribute("viewBox", `${begin} 0 ${span} ${whole[3]}`);
    marks.replaceChildren();
    for (const value of ticks(begin / unit, (begin + span) / unit, 8)) {
      const x = left + (width * (value * unit - begin)) / span;
      marks.append(make("line", { x1: x, x2: x, y1: top + height, y2: top + height + 4, class: "axis" }));
      const text = make("text", { x, y: top + height + 17, class: "tick", "text-anchor": "middle" });
      text.textContent = +value.toPrecision(6);
      marks.append(text);
    }
    if (reset) reset.hidden = span === whole[2];
  };
  const at = (event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal.width;
    const x = ((event.clientX - box.left) / box.width) * view;
    return Math.min(left + width, Math.max(left, x));
  };
  let from = null, shade = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button) return; // touch scrolls
    from = at(event);
    shade = make("rect", { x: from, y: top, width: 0, height, class: "select" });
    svg.append(shade);
    event.preventDefault();
  });
  window.addEventListener("pointermove", (event) => {
    if (from === null) return;
    shade.setAttribute("x", Math.min(from, at(event)));
    shade.setAttribute("width", Math.abs(at(event) - from));
  });
  window.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const [begin, , span] = plot.getAttribute("viewBox").split(" ").map(Number);
    const [a, b] = [from, at(event)].sort((p, q) => p - q);
    shade.remove();
    from = null;
    if (b - a > 4) show(begin + (span * (a - left)) / width, (span * (b - a)) / width);
  });
  svg.addEventListener("dblclick", () => show(whole[0], whole[2]));
  if (reset) reset.addEventListener("click", () => show(whole[0], whole[2]));
}
for (const figure of document.querySelectorAll("figure")) {
  const button = figure.querySelector(".export");
  if (!button) continue;
  button.hidden = false;
  button.addEventListener("click", () => {
    const copy = figure.querySelector("svg").cloneNode(true);
    const style = make("style", {});
    style.textContent = document.querySelector("style").textContent;
    copy.prepend(style);
    copy.setAttribute("width", copy.viewBox.baseVal.width);
    copy.setAttribute("height", copy.viewBox.baseVal.height);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
    link.download = `${figure.id}.svg`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}
