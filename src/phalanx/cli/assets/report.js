"use strict";
// Shows the values at the place of a chart that is pointed at, or that the arrow keys have reached.
for (const plot of document.querySelectorAll(".plot")) {
  const area = plot.querySelector(".area");
  const told = JSON.parse(plot.dataset.points);
  const xs = told.x ?? [...new Set(told.curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const first = Number(plot.dataset.first), last = Number(plot.dataset.last);
  let at = xs.length - 1;

  const nearest = (values, x) => {
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - values[low - 1] < values[low] - x ? low - 1 : low;
  };
  const text = (value) => {
    if (value === null) return "–";
    if (told.percent) return `${+(100 * value).toPrecision(5)} %`;
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(5));
  };
  const line = (words, colour) => {
    const element = document.createElement("div");
    element.textContent = words;
    if (colour !== undefined) element.className = `run c${colour}`;
    return element;
  };
  const lines = () => {
    if (!told.curves) {
      const begin = at > 0 ? xs[at - 1] + 1 : first;
      const head = begin < xs[at] ? `steps ${begin} to ${xs[at]}` : `step ${xs[at]}`;
      return [head, ...told.rows.map((row, number) => row[at] === null ? null
        : line(`replica ${number}: ${Math.round(100 * row[at])} % busy`)),
        ...told.marks.filter((mark) => mark[1] === at).map((mark) => line(mark[2]))];
    }
    return [`step ${xs[at]}`, ...told.curves.map((curve) => {
      if (xs[at] < curve.x[0] || xs[at] > curve.x[curve.x.length - 1]) return null;
      const found = nearest(curve.x, xs[at]);
      const where = curve.x[found] === xs[at] ? "" : ` (step ${curve.x[found]})`;
      return line(`${curve.name}: ${text(curve.y[found])}${where}`, curve.colour);
    })];
  };
  const hide = () => { for (const old of area.querySelectorAll(".tip, .cursor")) old.remove(); };
  const show = () => {
    hide();
    const place = (xs[at] - first) / (last - first);
    const cursor = document.createElement("div"), tip = document.createElement("div");
    cursor.className = "cursor";
    cursor.style.left = `${100 * place}%`;
    tip.className = "tip";
    tip.style[place < 0.5 ? "left" : "right"] = `calc(${100 * (place < 0.5 ? place : 1 - place)}% + 8px)`;
    const [head, ...rest] = lines();
    const bold = document.createElement("b");
    bold.textContent = head;
    tip.append(bold, ...rest.filter((each) => each !== null));
    area.append(cursor, tip);
  };
  const point = (event) => {
    const box = area.getBoundingClientRect();
    const x = first + (last - first) * (event.clientX - box.left) / box.width;
    at = told.curves ? nearest(xs, x) : Math.min(xs.length - 1, Math.max(0, xs.findIndex((end) => end >= x)));
    show();
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined) return;
    at = Math.min(xs.length - 1, Math.max(0, at + by));
    event.preventDefault();
    show();
  });
}
