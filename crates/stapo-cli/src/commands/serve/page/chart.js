"use strict";
// Line charts that grow: stapo.chart(options) makes a figure, and `show` draws data into it whenever there is news.
(() => {
  const { element, svg, number, between } = stapo;
  const MARGIN = { top: 6, right: 10, bottom: 34 };
  const HEIGHT = 180;

  // The axes of chart::Scale: round ends, 0 included unless all values are far from it and differ.
  const niceStep = (rough) => {
    const power = 10 ** Math.floor(Math.log10(Math.max(rough, Number.MIN_VALUE)));
    return [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9)) * power;
  };
  const around = (values) => {
    let low = Infinity;
    let high = -Infinity;
    for (const value of values)
      if (Number.isFinite(value)) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    if (low > high) return [0, 1];
    const isConstant = high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high));
    if (low > 0 && (low < 0.6 * high || isConstant)) low = 0;
    else if (high < 0 && (high > 0.6 * low || isConstant)) high = 0;
    if (low === 0 && high === 0) high = 1;
    const step = niceStep((high - low) / 4);
    return [Math.floor(low / step) * step, Math.ceil(high / step) * step];
  };
  const ticks = (low, high, n, isWhole) => {
    const step = Math.max(niceStep((high - low) / n), isWhole ? 1 : 0);
    const decimals = Math.max(0, -Math.floor(Math.log10(step)));
    const power = (x) => Math.floor(Math.log10(Math.max(x, Number.MIN_VALUE)) + 1e-9);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n <= high / step + 1e-9; n += 1) {
      const value = Math.abs(n * step) < 1e-9 * step ? 0 : n * step;
      const isPlain = decimals <= 3 && Math.abs(value) < 1e6;
      const digits = Math.max(0, power(Math.abs(value)) - power(step)) + 1;
      found.push([value, (isPlain ? value.toFixed(decimals) : number(value, digits)).replace(/^-/, "−")]);
    }
    return found;
  };

  // Whole powers of ten around the positive values, as exponents; nothing where no value is positive.
  const decades = (values) => {
    const positive = values.filter((value) => value > 0 && Number.isFinite(value));
    if (!positive.length) return null;
    const low = Math.floor(Math.log10(positive.reduce((a, b) => Math.min(a, b))));
    return [low, Math.max(low + 1, Math.ceil(Math.log10(positive.reduce((a, b) => Math.max(a, b)))))];
  };
  const logTicks = (low, high) => {
    const step = Math.ceil((high - low) / 5);
    const found = [];
    for (let n = low; n <= high; n += step) found.push([10 ** n, number(10 ** n, 1)]);
    return found;
  };

  // A debiased exponential moving average.
  const smoothed = (ys, weight) => {
    if (weight === 0) return ys;
    let sum = 0;
    let mass = 0;
    return ys.map((y) => {
      sum = weight * sum + (1 - weight) * y;
      mass = weight * mass + (1 - weight);
      return sum / mass;
    });
  };

  const nearest = (xs, x) => {
    let low = 0;
    let high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle;
      else high = middle;
    }
    return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
  };

  const download = (name, kind, text) => {
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  // Colours are variables of the page; a separate file needs them as numbers.
  const resolved = (text) => {
    const probe = element("span");
    document.body.append(probe);
    const found = text.replace(/color-mix\([^"]*\)|var\(--[a-z0-9]+\)/g, (color) => {
      probe.style.color = color;
      return getComputedStyle(probe).color;
    });
    probe.remove();
    return found;
  };
  const csv = (chart) => {
    const quoted = (text) => (/[",\n\r]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text);
    const lines = [["line", chart.axis, "value", "low", "high"].map(quoted).join(",")];
    for (const line of chart.data.lines) {
      line.x.forEach((x, i) => {
        const ends = line.low?.length ? [line.low[i], line.high[i]] : ["", ""];
        lines.push([quoted(line.label), x, line.y[i], ...ends].join(","));
      });
    }
    for (const band of chart.data.bands)
      band.x.forEach((x, i) => lines.push([quoted(band.label), x, "", band.low[i], band.high[i]].join(",")));
    return lines.join("\r\n") + "\r\n";
  };

  const path = (points) => points.map(([x, y], i) => (i ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1)).join("");
  const area = (xs, low, high) =>
    path([...xs.map((x, i) => [x, high[i]]), ...xs.map((x, i) => [x, low[i]]).reverse()]) + "Z";

  // options: id, title, note, unit; onRange(from, to) is called after a zoom, with nothing for the whole axis.
  stapo.chart = (options) => {
    const figure = element("figure", "live");
    figure.id = options.id;
    const caption = element("figcaption");
    const tools = element("span", "tools");
    const plot = element("div", "plot");
    caption.append(
      element("b", "", options.title),
      element("span", "", [options.note, options.unit].filter(Boolean).join(", ")),
    );
    figure.append(caption, tools, plot);
    const chart = {
      figure,
      data: { lines: [], bands: [], marks: [] },
      axis: "step",
      range: null,
      smooth: 0,
      hidden: new Set(),
      isLog: false,
    };
    const addTool = (label, what, act, isPressed) => {
      const button = element("button", "", label);
      Object.assign(button, { type: "button", title: what });
      if (isPressed !== undefined) button.setAttribute("aria-pressed", String(isPressed));
      button.addEventListener("click", () => act(button));
      tools.append(button);
    };
    for (const tool of options.tools || []) addTool(...tool);
    const switched = (change) => (button) => {
      button.setAttribute("aria-pressed", String(change()));
      draw();
    };
    const toggleLog = () => {
      chart.isLog = !chart.isLog;
      return chart.isLog;
    };
    addTool("log", "draws a logarithmic axis", switched(toggleLog), false);
    const toggleLarge = () => figure.classList.toggle("large");
    addTool("large", "draws this chart over the whole width", switched(toggleLarge), false);
    const saveSvg = () => {
      const drawing = resolved(new XMLSerializer().serializeToString(plot.firstChild));
      download(options.id + ".svg", "image/svg+xml", drawing);
    };
    addTool("SVG", "saves this chart as SVG", saveSvg);
    addTool("CSV", "saves the numbers of this chart", () => download(options.id + ".csv", "text/csv", csv(chart)));
    let frame = null;

    const drawLegend = (drawing, entries, width) => {
      if (entries.length < 2) return 0;
      let [x, y] = [0, 12];
      for (const entry of entries) {
        const label = entry.label.length > 42 ? entry.label.slice(0, 40) + "…" : entry.label;
        const room = 38 + 6.6 * label.length;
        if (x > 0 && x + room > width) [x, y] = [0, y + 18];
        const key = svg("g", {
          class: "key",
          "data-key": entry.key,
          tabindex: 0,
          role: "button",
          "aria-pressed": !chart.hidden.has(entry.key),
        });
        key.append(
          entry.isBand
            ? svg("rect", {
                x,
                y: y - 10,
                width: 18,
                height: 12,
                fill: "var(--s" + (entry.series % 6) + ")",
                opacity: 0.3,
              })
            : svg("path", {
                d: "M" + x + " " + (y - 4) + "h18",
                stroke: "var(--s" + (entry.series % 6) + ")",
                "stroke-width": 2.5,
                "stroke-dasharray": entry.series >= 6 ? "6 4" : "none",
              }),
        );
        const text = svg("text", { x: x + 24, y, "font-size": 12, fill: "var(--ink)" });
        text.textContent = label;
        key.append(text);
        drawing.append(key);
        x += room;
      }
      return y + 8;
    };

    const draw = () => {
      const width = Math.max(240, plot.clientWidth);
      const { lines, bands, marks } = chart.data;
      const shownLines = lines.filter((line) => !chart.hidden.has(line.key));
      const shownBands = bands.filter((band) => !chart.hidden.has(band.key));
      const drawing = svg("svg", { role: "img", "aria-label": options.title });
      const entries = [...lines.filter((line) => !line.isThin), ...bands.map((band) => ({ ...band, isBand: true }))];
      const seen = new Set();
      const top =
        MARGIN.top +
        drawLegend(
          drawing,
          entries.filter(({ key }) => !seen.has(key) && seen.add(key)),
          width,
        );
      const curves = shownLines.map((line) => ({ ...line, drawn: smoothed(line.y, line.isThin ? 0 : chart.smooth) }));
      const xs = [...lines, ...bands].flatMap((line) => (line.x.length ? [line.x[0], line.x[line.x.length - 1]] : []));
      let [x0, x1] = chart.range || (xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1]);
      if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
      const isIn = (line, i) => line.x[i] >= x0 && line.x[i] <= x1;
      const values = [];
      for (const line of curves)
        line.x.forEach((_, i) => {
          if (isIn(line, i)) values.push(line.drawn[i], line.y[i]);
        });
      for (const line of curves)
        if (line.low?.length)
          line.x.forEach((_, i) => {
            if (isIn(line, i)) values.push(line.low[i], line.high[i]);
          });
      for (const band of shownBands)
        band.x.forEach((_, i) => {
          if (isIn(band, i)) values.push(band.low[i], band.high[i]);
        });
      const exponents = chart.isLog ? decades(values) : null;
      const [y0, y1] = exponents || around(values);
      const yTicks = exponents ? logTicks(y0, y1) : ticks(y0, y1, 5);
      // What is not positive lies below every logarithmic axis.
      const level = (y) => (exponents ? (y > 0 ? Math.log10(y) : y0) : y);
      const left = between(28, 10 + 7 * Math.max(...yTicks.map(([, label]) => label.length)), 90);
      const right = width - MARGIN.right;
      const height = figure.classList.contains("large") ? 2 * HEIGHT : HEIGHT;
      const bottom = top + height;
      const toX = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
      const toY = (y) => between(top, top + ((y1 - level(y)) / (y1 - y0)) * height, bottom);
      const text = (x, y, label, anchor) => {
        const made = svg("text", { x, y, "font-size": 12, fill: "var(--muted)", "text-anchor": anchor });
        made.textContent = label;
        drawing.append(made);
      };
      for (const [value, label] of yTicks) {
        drawing.append(
          svg("path", { d: "M" + left + " " + toY(value).toFixed(1) + "H" + right, stroke: "var(--grid)" }),
        );
        text(left - 6, toY(value) + 4, label, "end");
      }
      drawing.append(svg("path", { d: "M" + left + " " + bottom + "H" + right, stroke: "var(--muted)" }));
      for (const [value, label] of ticks(x0, x1, Math.min(6, (right - left) / 60), chart.axis === "step")) {
        text(toX(value), bottom + 16, label, "middle");
      }
      text((left + right) / 2, bottom + 31, chart.axis, "middle");
      const clip = "clip-" + options.id;
      const cut = svg("clipPath", { id: clip });
      cut.append(svg("rect", { x: left, y: top - 2, width: right - left, height: height + 4 }));
      const inside = svg("g", { "clip-path": "url(#" + clip + ")" });
      drawing.append(cut, inside);
      const color = (series) => "var(--s" + (series % 6) + ")";
      for (const band of shownBands)
        inside.append(
          svg("path", {
            d: area(band.x.map(toX), band.low.map(toY), band.high.map(toY)),
            fill: color(band.series),
            opacity: band.opacity || 0.2,
          }),
        );
      for (const line of curves) {
        if (line.low?.length)
          inside.append(
            svg("path", {
              d: area(line.x.map(toX), line.low.map(toY), line.high.map(toY)),
              fill: color(line.series),
              opacity: 0.16,
            }),
          );
      }
      for (const line of curves) {
        const stroke = line.isThin
          ? "color-mix(in srgb, " + color(line.series) + " 55%, var(--sheet))"
          : color(line.series);
        if (chart.smooth > 0 && !line.isThin)
          inside.append(
            svg("path", {
              d: path(line.x.map((x, i) => [toX(x), toY(line.y[i])])),
              fill: "none",
              stroke,
              opacity: 0.25,
            }),
          );
        inside.append(
          svg("path", {
            class: "curve",
            d: path(line.x.map((x, i) => [toX(x), toY(line.drawn[i])])),
            fill: "none",
            stroke,
            "stroke-width": line.isThin ? 0.9 : 1.8,
            "stroke-linejoin": "round",
            "stroke-dasharray": line.series >= 6 ? "6 4" : "none",
          }),
        );
        if (line.x.length <= 24 && !line.isThin)
          line.x.forEach((x, i) =>
            inside.append(
              svg("circle", { cx: toX(x).toFixed(1), cy: toY(line.drawn[i]).toFixed(1), r: 2.4, fill: stroke }),
            ),
          );
      }
      for (const mark of marks.filter((mark) => mark.x >= x0 && mark.x <= x1)) {
        const x = toX(mark.x).toFixed(1);
        drawing.append(
          svg("path", { class: "mark " + mark.kind, d: "M" + x + " " + bottom + "l-4 6h8z", "data-t": mark.text }),
        );
      }
      const hit = svg("rect", { class: "hit", x: left, y: top, width: right - left, height });
      drawing.append(hit);
      const whole = bottom + MARGIN.bottom;
      for (const [name, value] of [
        ["viewBox", "0 0 " + width + " " + whole],
        ["width", width],
        ["height", whole],
      ])
        drawing.setAttribute(name, value);
      frame = { left, right, top, height, x0, x1, toX, toY, curves, bands: shownBands, hit };
      plot.replaceChildren(drawing);
    };

    // The text under the pointer: an area next to the nearest x, handed to the shared tip.
    const describe = (event) => {
      if (!frame || frame.curves.length + frame.bands.length === 0) return;
      const box = plot.firstChild.getBoundingClientRect();
      const at =
        frame.x0 + ((event.clientX - box.left - frame.left) / (frame.right - frame.left)) * (frame.x1 - frame.x0);
      const all = [...frame.curves, ...frame.bands].filter((line) => line.x.length);
      if (!all.length) return;
      const closest = all
        .map((line) => line.x[nearest(line.x, at)])
        .sort((a, b) => Math.abs(a - at) - Math.abs(b - at))[0];
      const room = ((frame.x1 - frame.x0) / (frame.right - frame.left)) * 8;
      const unit = options.unit ? " " + options.unit : "";
      const texts = [chart.axis + " " + number(closest, 6)];
      const keys = [];
      for (const line of all) {
        const i = nearest(line.x, closest);
        if (Math.abs(line.x[i] - closest) > room) continue;
        const isRange = line.drawn === undefined;
        const ends = line.low?.length ? number(line.low[i]) + " to " + number(line.high[i]) : "";
        const value = isRange ? ends : number(line.drawn[i], 4) + unit + (ends ? "  (" + ends + ")" : "");
        texts.push((line.label + "  " + value).replace(/\n/g, " "));
        keys.push([line.key, line.series, isRange ? "" : frame.toY(line.drawn[i]).toFixed(1)].join(":"));
      }
      frame.hit.dataset.x = frame.toX(closest).toFixed(1);
      frame.hit.dataset.t = texts.slice(0, 24).join("\n");
      frame.hit.dataset.k = keys.slice(0, 23).join(" ");
    };

    // One finger reads values, or pans a zoomed chart; two zoom. The page scrolls when a finger moves up or down.
    const fingers = new Map();
    let grip = null;
    const partAt = (clientX) =>
      (clientX - plot.firstChild.getBoundingClientRect().left - frame.left) / (frame.right - frame.left);
    const isMoving = () => fingers.size === 2 || chart.range !== null;
    const takeGrip = () => {
      grip = { range: [frame.x0, frame.x1], parts: [...fingers.values()] };
    };
    const moveFingers = () => {
      const [x0, x1] = grip.range;
      const [was, is] = [grip.parts, [...fingers.values()]];
      if (is.length === 1) {
        const shift = (was[0] - is[0]) * (x1 - x0);
        options.onRange(x0 + shift, x1 + shift);
      } else if (is.length === 2 && Math.abs(is[1] - is[0]) > 0.02) {
        const width = ((was[1] - was[0]) / (is[1] - is[0])) * (x1 - x0);
        if (width <= 0) return;
        const from = x0 + was[0] * (x1 - x0) - is[0] * width;
        options.onRange(from, from + width);
      }
    };
    const lift = (event) => {
      if (fingers.delete(event.pointerId) && fingers.size) takeGrip();
    };
    plot.addEventListener("pointerdown", (event) => {
      if (!frame || event.target !== frame.hit || event.pointerType !== "touch") return;
      fingers.set(event.pointerId, partAt(event.clientX));
      takeGrip();
      // What a finger moves is redrawn under the finger, so the figure takes its events.
      if (isMoving()) for (const id of fingers.keys()) plot.setPointerCapture(id);
      describe(event);
    });
    plot.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) return;
      fingers.set(event.pointerId, partAt(event.clientX));
      if (isMoving()) moveFingers();
      else describe(event);
    });
    plot.addEventListener("pointerup", lift);
    plot.addEventListener("pointercancel", lift);

    // A drag zooms, a drag with Shift or the middle button pans, a double click shows everything.
    let drag = null;
    const xAt = (event) => {
      const box = plot.firstChild.getBoundingClientRect();
      const part = between(0, (event.clientX - box.left - frame.left) / (frame.right - frame.left), 1);
      return frame.x0 + part * (frame.x1 - frame.x0);
    };
    plot.addEventListener("pointerdown", (event) => {
      if (!frame || event.target !== frame.hit || event.pointerType === "touch") return;
      drag = { from: xAt(event), isPan: event.shiftKey || event.button === 1, range: [frame.x0, frame.x1], box: null };
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch") return;
      if (!drag) {
        describe(event);
        return;
      }
      const to = xAt(event);
      if (drag.isPan) {
        const shift = drag.from - to;
        const range = [frame.x0 + shift, frame.x1 + shift];
        options.onRange(range[0], range[1]);
        return;
      }
      if (!drag.box) {
        drag.box = svg("rect", { class: "select", y: frame.top, height: frame.height });
        plot.firstChild.append(drag.box);
      }
      drag.box.setAttribute("x", Math.min(frame.toX(drag.from), frame.toX(to)));
      drag.box.setAttribute("width", Math.abs(frame.toX(to) - frame.toX(drag.from)));
    });
    const release = (event) => {
      if (!drag) return;
      const [from, to] = [drag.from, xAt(event)].sort((a, b) => a - b);
      const isZoom = !drag.isPan && frame.toX(to) - frame.toX(from) > 6;
      if (drag.box) drag.box.remove();
      drag = null;
      if (isZoom) options.onRange(from, to);
    };
    plot.addEventListener("pointerup", release);
    plot.addEventListener("pointercancel", release);
    plot.addEventListener("dblclick", (event) => {
      if (frame && event.target === frame.hit) options.onRange(null, null);
    });
    plot.addEventListener("legend", (event) => {
      const { key, isOn } = event.detail;
      if (isOn) chart.hidden.delete(key);
      else chart.hidden.add(key);
      requestAnimationFrame(draw);
    });
    new ResizeObserver(() => {
      if (frame && Math.abs(Number(plot.firstChild.getAttribute("width")) - plot.clientWidth) > 2) draw();
    }).observe(plot);

    // data: lines [{ key, label, series, x, y, low, high, isThin }], bands [{ key, label, series, x, low, high }],
    // marks [{ x, kind, text }].
    chart.show = (data, { axis, range, smooth }) => {
      Object.assign(chart, { data, axis, range, smooth });
      draw();
    };
    return chart;
  };

  // A sparkline without axes.
  stapo.spark = (values, series) => {
    const drawing = svg("svg", { class: "spark", viewBox: "0 0 90 22", width: 72, height: 22, "aria-hidden": "true" });
    if (values.length < 2) return drawing;
    const low = Math.min(...values);
    const high = Math.max(...values);
    const toY = (value) => (high === low ? 11 : 20 - (18 * (value - low)) / (high - low));
    const points = values.map((value, i) => [1 + (88 * i) / (values.length - 1), toY(value)]);
    drawing.append(
      svg("path", { d: path(points), fill: "none", stroke: "var(--s" + series + ")", "stroke-width": 1.4 }),
    );
    return drawing;
  };
})();
