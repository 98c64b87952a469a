"use strict";
// What all pages share, under one name: making elements, the notation of numbers, the theme, the text under the pointer
// and legends.
// biome-ignore lint/correctness/noUnusedVariables: the scripts that follow on a page use it.
const stapo = (() => {
  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const SVG = "http://www.w3.org/2000/svg";
  const svg = (tag, attributes) => {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    return made;
  };

  // The notation of chart::significant: digits that count, no trailing zeros, powers of ten below 0.001 and from 1e6.
  const trimmed = (text) => (text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text);
  const number = (value, digits = 3) => {
    if (value === 0) return "0";
    if (!Number.isFinite(value)) return String(value);
    const power = Math.floor(Math.log10(Math.abs(value)));
    if (power >= -3 && power < 6) return trimmed(value.toFixed(Math.max(0, digits - 1 - power)));
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    return trimmed(mantissa) + "e" + Number(exponent);
  };

  const root = document.documentElement;
  const themes = ["system", "light", "dark"];
  // Browsers may deny localStorage to a page opened from a file; the page then starts with the system's theme.
  const remembered = () => {
    try {
      return localStorage.getItem("stapo-theme");
    } catch {
      return null;
    }
  };
  const remember = (theme) => {
    try {
      localStorage.setItem("stapo-theme", theme);
    } catch {
      /* denied */
    }
  };
  const button = document.getElementById("theme");
  const show = (theme) => {
    if (theme === "system") root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", theme);
    button.textContent = "theme: " + theme;
    button.dataset.now = theme;
  };
  show(themes.includes(remembered()) ? remembered() : "system");
  const nextTheme = () => {
    const next = themes[(themes.indexOf(button.dataset.now) + 1) % themes.length];
    show(next);
    remember(next);
  };
  button.addEventListener("click", nextTheme);

  // A line of the text under the pointer, with the colour of its series.
  const tip = document.getElementById("tip");
  const swatched = (text, series) => {
    const line = element("div", "line");
    const swatch = element("span", "swatch");
    swatch.style.background = "var(--s" + (series % 6) + ")";
    line.append(swatch, element("span", "", text));
    return line;
  };
  const isOff = (hovered, key) =>
    hovered.closest("svg").querySelector('.key[data-key="' + key + '"][aria-pressed="false"]') !== null;
  const fill = (hovered) => {
    const [first, ...others] = hovered.dataset.t.split("\n");
    const keys = hovered.dataset.k === undefined ? null : hovered.dataset.k.split(" ").map((key) => key.split(":"));
    tip.replaceChildren(element("div", keys ? "title" : "", first));
    others.forEach((text, idx) => {
      if (!keys) tip.append(element("div", "", text));
      else if (!isOff(hovered, keys[idx][0])) tip.append(swatched(text, Number(keys[idx][1])));
    });
  };

  // The text is next to a point of a chart, and above or below anything else, so that it never covers its subject.
  const between = (low, value, high) => Math.max(low, Math.min(value, high));
  const moveTip = (around, event, isBeside) => {
    const { width, height } = tip.getBoundingClientRect();
    const right = around.right + 14;
    const left = around.left - width - 14;
    const besideFits = right + width < innerWidth - 4 || left > 4;
    let x = between(4, event.clientX - width / 2, innerWidth - width - 4);
    let y = around.top - height - 8;
    if (isBeside && besideFits) {
      x = right + width < innerWidth - 4 ? right : left;
      y = between(4, event.clientY - height / 2, innerHeight - height - 4);
    } else if (y < 4) y = around.bottom + 8;
    tip.style.left = x + "px";
    tip.style.top = y + "px";
  };

  // A line at the x under the pointer, with a dot on each curve.
  let cross = null;
  const uncross = () => {
    if (cross) cross.remove();
    cross = null;
  };
  const mark = (hit) => {
    uncross();
    const x = hit.dataset.x;
    const top = Number(hit.getAttribute("y"));
    cross = svg("g", { class: "cross" });
    cross.append(svg("path", { d: "M" + x + " " + top + "V" + (top + Number(hit.getAttribute("height"))) }));
    for (const key of hit.dataset.k.split(" ").filter(Boolean)) {
      const [entry, series, y] = key.split(":");
      if (y !== "" && !isOff(hit, entry))
        cross.append(svg("circle", { cx: x, cy: y, r: 3.4, fill: "var(--s" + (series % 6) + ")" }));
    }
    hit.parentNode.append(cross);
  };
  const hide = () => {
    tip.hidden = true;
    uncross();
  };
  const hover = (event) => {
    const hovered = event.target.closest ? event.target.closest("[data-t]") : null;
    if (!hovered || hovered.dataset.t === "") {
      hide();
      return;
    }
    const isStrip = hovered.dataset.x !== undefined;
    fill(hovered);
    tip.hidden = false;
    if (isStrip) mark(hovered);
    else uncross();
    const box = ((isStrip && cross.firstChild) || hovered).getBoundingClientRect();
    moveTip(box, event, isStrip || hovered.tagName === "circle");
  };
  document.addEventListener("pointermove", hover);
  document.addEventListener("pointerdown", hover);
  document.addEventListener("scroll", hide, { passive: true });

  // A legend entry shows and hides its marks; a double click leaves only them.
  const setKey = (drawing, key, isOn) => {
    const entry = drawing.querySelector('.key[data-key="' + key + '"]');
    entry.setAttribute("aria-pressed", String(isOn));
    for (const shown of drawing.querySelectorAll('[data-of="' + key + '"]')) shown.classList.toggle("off", !isOn);
    entry.dispatchEvent(new CustomEvent("legend", { bubbles: true, detail: { key, isOn } }));
  };
  const keyOf = (event) => (event.target.closest ? event.target.closest("svg .key") : null);
  const toggle = (key) => setKey(key.closest("svg"), key.dataset.key, key.getAttribute("aria-pressed") === "false");
  document.addEventListener("click", (event) => {
    if (keyOf(event)) toggle(keyOf(event));
  });
  document.addEventListener("keydown", (event) => {
    if ((event.key === "Enter" || event.key === " ") && keyOf(event)) {
      event.preventDefault();
      toggle(keyOf(event));
    }
  });
  document.addEventListener("dblclick", (event) => {
    const chosen = keyOf(event);
    if (!chosen) return;
    const drawing = chosen.closest("svg");
    const others = [...drawing.querySelectorAll(".key")].filter((key) => key !== chosen);
    const wasAlone = others.every((key) => key.getAttribute("aria-pressed") === "false");
    for (const key of others) setKey(drawing, key.dataset.key, wasAlone);
    setKey(drawing, chosen.dataset.key, true);
  });

  return { element, svg, number, nextTheme, hide, between };
})();
