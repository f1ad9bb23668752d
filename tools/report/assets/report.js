"use strict";
// The page is whole without this: it adds values under the pointer, the theme switch, and, on pages
// that a dashboard serves, looking again.
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  const SVG = "http://www.w3.org/2000/svg";

  // Theme: what the reader chose, else what the system says.
  const button = document.getElementById("theme");
  const remember = (theme) => { try { localStorage.setItem("torchrelay-theme", theme); } catch { /* not kept */ } };
  const remembered = () => { try { return localStorage.getItem("torchrelay-theme"); } catch { return null; } };
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const named = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `switch to ${dark() ? "light" : "dark"} colours`); };
  const asked = new URLSearchParams(location.search).get("theme") || remembered();
  if (asked === "dark" || asked === "light") root.dataset.theme = asked;
  button.hidden = false;
  named();
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; remember(root.dataset.theme); named(); });

  // Values under the pointer.
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + box.height + 24 > innerHeight ? y - box.height - 12 : y + 16}px`;
  };
  const written = (value) => (typeof value === "number" ? String(Number(value.toPrecision(5))) : value);
  const nearest = (points, epoch) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (points[middle][0] < epoch) low = middle; else high = middle; }
    return Math.abs(points[low][0] - epoch) <= Math.abs(points[high][0] - epoch) ? points[low] : points[high];
  };
  const known = new WeakMap();
  const data = (chart) => {
    if (!known.has(chart)) known.set(chart, { frame: JSON.parse(chart.dataset.frame), series: JSON.parse(chart.dataset.series) });
    return known.get(chart);
  };
  // The step at the end of an epoch, or the epoch of a step.
  const otherAxis = (chart, at) => {
    if (!chart.dataset.other) return "";
    const [unit, pairs] = JSON.parse(chart.dataset.other);
    const found = pairs.find((pair) => (chart.dataset.unit === "epoch" ? pair[0] === at : pair[0] >= at));
    return found ? `, ${unit} ${found[1]}` : "";
  };
  const clear = (chart) => { chart.querySelectorAll(".hover").forEach((one) => one.remove()); tip.hidden = true; };
  const point = (chart, epoch, clientX, clientY) => {
    const { frame: [x0, x1, left, right, y0, y1, bottom, top, log], series } = data(chart);
    const y = (value) => {
      const [low, high, at] = log ? [y0, y1, value].map(Math.log) : [y0, y1, value];
      return bottom + (top - bottom) * Math.min(1, Math.max(0, (at - low) / (high - low || 1)));
    };
    const filled = series.filter((one) => one[3].length);
    const at = filled.map((one) => nearest(one[3], epoch)).reduce((a, b) => (Math.abs(b[0] - epoch) < Math.abs(a[0] - epoch) ? b : a))[0];
    clear(chart);
    const x = left + (right - left) * ((at - x0) / (x1 - x0 || 1));
    const group = document.createElementNS(SVG, "g");
    group.setAttribute("class", "hover");
    const line = document.createElementNS(SVG, "line");
    for (const [name, value] of Object.entries({ x1: x, x2: x, y1: top - 6, y2: bottom, class: "cursor" })) line.setAttribute(name, value);
    group.append(line);
    const lines = [`${chart.dataset.unit} ${at}${otherAxis(chart, at)}`];
    for (const [name, colour, , points] of filled) {
      const found = nearest(points, at);
      if (found[0] !== at) continue;
      lines.push(`${name}: ${written(found[1])}`);
      if (typeof found[1] !== "number" || (log && found[1] <= 0)) continue;
      const dot = document.createElementNS(SVG, "circle");
      for (const [key, value] of Object.entries({ cx: x, cy: y(found[1]), r: 4, class: `cursordot s${colour}` })) dot.setAttribute(key, value);
      group.append(dot);
    }
    chart.append(group);
    chart.dataset.at = at;
    show(lines.join("\n"), clientX, clientY);
  };
  const epochUnder = (chart, clientX) => {
    const box = chart.getBoundingClientRect();
    const [x0, x1, left, right] = data(chart).frame;
    return x0 + (x1 - x0) * (((clientX - box.left) / box.width) * chart.viewBox.baseVal.width - left) / (right - left);
  };
  const follow = (event) => {
    const chart = event.target.closest?.("svg[data-series]");
    const title = event.target.closest?.("svg *")?.closest("g, rect, path, circle")?.querySelector(":scope > title");
    document.querySelectorAll(".hover").forEach((one) => { if (one.closest("svg") !== chart) one.remove(); });
    if (chart && !title) point(chart, epochUnder(chart, event.clientX), event.clientX, event.clientY);
    else if (title) show(title.textContent, event.clientX, event.clientY);
    else tip.hidden = true;
  };
  document.addEventListener("pointermove", follow);
  document.addEventListener("pointerdown", follow);
  document.addEventListener("keydown", (event) => {
    const chart = event.target.closest?.("svg[data-series]");
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!chart) return;
    if (event.key === "Escape") clear(chart);
    if (!step) return;
    event.preventDefault();
    const epochs = [...new Set(data(chart).series.flatMap((one) => one[3].map((pair) => pair[0])))].sort((a, b) => a - b);
    const now = chart.dataset.at === undefined ? -1 : epochs.indexOf(Number(chart.dataset.at));
    const next = epochs[Math.max(0, Math.min(epochs.length - 1, now + step))];
    const box = chart.getBoundingClientRect();
    point(chart, next, box.left + box.width / 2, box.top + box.height / 2);
  });
  document.addEventListener("focusout", (event) => { const chart = event.target.closest?.("svg[data-series]"); if (chart) clear(chart); });

  // On the list of a dashboard: the chosen runs are compared.
  const offer = () => {
    const link = document.getElementById("comparison");
    if (!link) return;
    const names = [...document.querySelectorAll(".pick:checked")].map((one) => one.value);
    link.hidden = names.length < 2 || names.length > 8;
    link.textContent = `Compare ${names.length} runs`;
    link.href = `/compare/${names.join("/")}`;
  };
  document.addEventListener("change", offer);
  offer();

  // On a dashboard: ask again, and put in only what is new, with what the reader had opened still open.
  if (!document.body.dataset.live) return;
  const PAUSE = 3000;
  let tag = document.body.dataset.live;
  const key = (one) => `${one.closest("section")?.id}/${one.querySelector("summary")?.textContent.replace(/[0-9]+/g, "#")}`;
  const again = async () => {
    try {
      const answer = await fetch(location.pathname, { headers: { "If-None-Match": tag }, cache: "no-store" });
      if (answer.status === 200) {
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        tag = answer.headers.get("ETag") || tag;
        replace(fresh);
      }
      root.dataset.away = "";
    } catch { root.dataset.away = "1"; }
    setTimeout(again, PAUSE);
  };
  const replace = (fresh) => {
    const main = document.querySelector("main");
    const opened = new Map([...main.querySelectorAll("details")].map((one) => [key(one), one.open]));
    const checked = new Set([...main.querySelectorAll("input:checked")].map((one) => one.id));
    const scrolled = [...main.querySelectorAll(".scroll")].map((one) => [one.scrollLeft, one.scrollTop]);
    const focused = document.activeElement?.id;
    const content = document.adoptNode(fresh.querySelector("main"));
    content.querySelectorAll("details").forEach((one) => { if (opened.has(key(one))) one.open = opened.get(key(one)); });
    content.querySelectorAll("input").forEach((one) => { one.checked = checked.has(one.id); });
    main.replaceWith(content);
    offer();
    content.querySelectorAll(".scroll").forEach((one, at) => { if (scrolled[at]) [one.scrollLeft, one.scrollTop] = scrolled[at]; });
    if (focused) document.getElementById(focused)?.focus();
    document.querySelector("h1").textContent = fresh.querySelector("h1").textContent;
    document.title = fresh.title;
    tip.hidden = true;
    root.dataset.refreshed = String(Number(root.dataset.refreshed || 0) + 1);
  };
  again();
})();
