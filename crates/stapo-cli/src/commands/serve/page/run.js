"use strict";
// One run, live.
(() => {
  const { element, number } = stapo;
  const { rows, views, ask, anchor, remember, duration, badge } = stapo.app;

  const { PHASES, plan, label } = stapo.runCharts;
  const scaled = (values, scale) => (scale === undefined ? values : values.map((value) => scale * value));
  const EMPTY = { x: [], y: [] };
  // The data of a chart from curves by key.
  const dataOf = (chart, curves, marks) => ({
    lines: chart.keys
      .map((key, idx) => {
        const curve = curves[key] || EMPTY;
        return {
          key: String(idx),
          label: label(key),
          series: idx,
          x: curve.x,
          y: scaled(curve.y, chart.scale),
          low: curve.low && scaled(curve.low, chart.scale),
          high: curve.high && scaled(curve.high, chart.scale),
        };
      })
      .filter((line) => line.x.length),
    bands: chart.bands
      .map(([name, low, high], idx) => ({
        key: String(chart.keys.length + idx),
        label: name,
        series: 0,
        opacity: 0.14 + 0.1 * idx,
        x: (curves[low] || EMPTY).x,
        low: scaled((curves[low] || EMPTY).y, chart.scale),
        high: scaled((curves[high] || EMPTY).y, chart.scale),
      }))
      .filter((band) => band.x.length && band.low.length === band.high.length),
    marks,
  });

  // Where on the axis a step lies: the curve of the key `step` over that axis.
  const placed = (steps, step) => {
    if (!steps?.x.length) return null;
    const after = steps.y.findIndex((known) => known >= step);
    return after < 0 ? steps.x[steps.x.length - 1] : steps.x[after];
  };
  const marksOf = (events, steps) =>
    events
      .filter((event) => ["warning", "canary", "resume", "stop", "checkpoint_refused"].includes(event.event))
      .map((event) => ({
        x: placed(steps, event.step),
        kind: event.event,
        text: event.event.replace("_", " ") + " after step " + event.step + "\n" + (event.text || event.reason || ""),
      }))
      .filter((mark) => mark.x !== null);

  const phaseColor = (phase) => {
    const position = PHASES.indexOf(phase);
    return position < 6 ? "var(--s" + position + ")" : "var(--muted)";
  };
  // The phases of the last steps, one line per step.
  const timeline = (curves) => {
    const phases = PHASES.filter((phase) => curves["seconds." + phase] && curves["seconds." + phase].y.length);
    if (!phases.length) return null;
    const box = element("section");
    box.append(element("h3", "", "Phases of the last steps"));
    const legend = element("div", "keysof");
    phases.forEach((phase) => {
      const entry = element("span");
      const swatch = element("i");
      swatch.style.background = phaseColor(phase);
      entry.append(swatch, phase);
      legend.append(entry);
    });
    const grid = element("div", "phases");
    const steps = curves.step.x.slice(-8);
    const seconds = (phase, x) => {
      const curve = curves["seconds." + phase];
      const i = curve.x.lastIndexOf(x);
      return i < 0 ? 0 : curve.y[i];
    };
    const totals = steps.map((x) => phases.reduce((sum, phase) => sum + seconds(phase, x), 0));
    const longest = Math.max(...totals, 1e-9);
    steps.forEach((x, row) => {
      const track = element("div", "track");
      phases.forEach((phase) => {
        const part = element("i");
        part.style.width = (100 * seconds(phase, x)) / longest + "%";
        part.style.background = phaseColor(phase);
        part.dataset.t =
          phase +
          "  " +
          number(seconds(phase, x)) +
          " s\n" +
          number((100 * seconds(phase, x)) / (totals[row] || 1)) +
          " % of the step's " +
          number(totals[row]) +
          " s";
        track.append(part);
      });
      grid.append(element("span", "", number(x, 6)), track, element("span", "n", number(totals[row]) + " s"));
    });
    box.append(legend, grid);
    return box;
  };

  const happened = (events) => {
    const box = element("details");
    box.append(element("summary", "", "What happened (" + events.length + ")"));
    const table = element("table");
    for (const event of [...events].reverse().slice(0, 200)) {
      const line = element("tr");
      const what =
        event.text ||
        event.reason ||
        (event.writer ? event.writer.host + ", stapo " + event.writer.program + ", " + event.writer.device : "");
      for (const text of [event.event.replace("_", " "), what, "step " + event.step, event.time])
        line.append(element("td", "", text));
      table.append(line);
    }
    const scroll = element("div", "scroll");
    scroll.append(table);
    box.append(scroll);
    return box;
  };

  const head = (box, run, facts, curves = {}) => {
    const row = rows.get(run);
    const line = element("div", "bar");
    line.append(element("h2", "", run));
    if (row) {
      line.append(badge(row));
      if (row.status.text) line.append(element("span", "note", row.status.text));
      line.append(
        element(
          "span",
          "",
          "step " +
            row.step +
            (row.steps ? " of " + row.steps : "") +
            (row.seconds_left && row.status.kind === "running" ? ", " + duration(row.seconds_left) + " left" : ""),
        ),
      );
    }
    const links = element("span", "grow");
    if (facts.recorded_steps.length)
      links.append(
        anchor("responses", "responses", { run }),
        " · ",
        anchor("samples of all steps", "samples", { run }),
        " · ",
      );
    links.append(
      anchor("compare with others", "compare", { run }),
      " · ",
      anchor("evaluations", "evaluations", { run }),
    );
    line.append(links);
    box.replaceChildren(line);
    if (row?.note || row?.tags) {
      const written = element("p", "note", row.note || "");
      for (const tag of row.tags || []) written.append(" ", element("span", "tag own", tag));
      box.append(written);
    }
    if (row?.status.kind === "running") box.append(live(facts, curves));
    if (facts.evaluations.length) {
      const list = element("p", "note", "evaluated in ");
      facts.evaluations.forEach((name, idx) => {
        list.append(idx ? ", " : "", anchor(name, "evaluations", { run }));
      });
      box.append(list);
    }
    if (facts.problem) box.append(element("p", "problem", facts.problem));
  };

  // Axis, smoothing and zoom for all charts of a view. `changed(isNewData)` is called after each change.
  stapo.chartControls = (params, axes, changed) => {
    const state = {
      axis: params.get("x") || "step",
      smooth: Number(params.get("smooth") || 0),
      range: params.get("from") === null ? null : [Number(params.get("from")), Number(params.get("to"))],
    };
    const bar = element("div", "bar");
    const axis = element("select");
    for (const name of axes) axis.append(new Option(stapo.runCharts.AXES[name], name, false, name === state.axis));
    const smooth = element("input");
    Object.assign(smooth, { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth });
    const button = (text, title, act) => {
      const made = element("button", "", text);
      Object.assign(made, { type: "button", title });
      made.addEventListener("click", act);
      return made;
    };
    const setRange = (from, to) => {
      state.range = from === null ? null : [from, to];
      remember({ from, to });
      changed(true);
    };
    const whole = () => (state.extent ? state.extent() : [0, 1]);
    const zoom = (factor, shift = 0) => {
      const [from, to] = state.range || whole();
      const [middle, half] = [(from + to) / 2 + shift * (to - from), ((to - from) / 2) * factor];
      setRange(middle - half, middle + half);
    };
    const labelled = (text, control) => {
      const made = element("label", "", text + " ");
      made.append(control);
      return made;
    };
    bar.append(
      labelled("x axis", axis),
      labelled("smoothing", smooth),
      button("+", "zoom in", () => zoom(0.5)),
      button("−", "zoom out", () => zoom(2)),
      button("all", "show everything", () => setRange(null, null)),
    );
    axis.addEventListener("change", () => {
      state.axis = axis.value;
      state.range = null;
      remember({ x: axis.value, from: null, to: null });
      changed(true);
    });
    smooth.addEventListener("input", () => {
      state.smooth = Number(smooth.value);
      remember({ smooth: state.smooth || null });
      changed(false);
    });
    const key = (event) => {
      if (event.key === "ArrowLeft") zoom(1, -0.25);
      else if (event.key === "ArrowRight") zoom(1, 0.25);
      else if (event.key === "+") zoom(0.5);
      else if (event.key === "-") zoom(2);
      else if (event.key === "0") setRange(null, null);
    };
    return { bar, state, setRange, key };
  };

  // The charts that come first, in their order, in every run. A browser that keeps nothing forgets them.
  const PINS = "stapo-charts";
  const readPins = () => {
    try {
      const found = JSON.parse(localStorage.getItem(PINS) || "[]");
      return Array.isArray(found) ? found : [];
    } catch {
      return [];
    }
  };
  const writePins = (pins) => {
    try {
      localStorage.setItem(PINS, JSON.stringify(pins));
    } catch {
      // The order then lasts as long as the page.
    }
  };

  // What a running process is doing, by the pace of its last step, and what it takes.
  const live = (facts, curves) => {
    const last = (key) => curves[key]?.y[curves[key].y.length - 1];
    const parts = [];
    let passed = facts.silent_seconds;
    const phases = PHASES.filter((phase) => phase !== "step" && last("seconds." + phase) > 0);
    const now = phases.find((phase) => {
      passed -= last("seconds." + phase);
      return passed < 0;
    });
    if (phases.length && facts.silent_seconds !== null)
      parts.push(
        now
          ? "now " + now.replace(/_/g, " ") + ", by the pace of the last step"
          : "longer in this step than in the last",
      );
    for (const [key, text] of [
      ["tokens_per_second.rollout", " tokens/s sampled"],
      ["tokens_per_second.update", " tokens/s learned"],
    ])
      if (last(key) !== undefined) parts.push(number(Math.round(last(key)), 6) + text);
    const gib = (bytes) => number(bytes / 2 ** 30) + " GiB";
    if (last("memory_bytes") !== undefined) parts.push(gib(last("memory_bytes")) + " of memory");
    if (facts.disk_free) parts.push(gib(facts.disk_free) + " of disk free");
    return element("p", "note live", parts.join(" · "));
  };

  views.run = async (root, params) => {
    const run = params.get("run") || "";
    let facts = await ask("/api/run", { run });
    const top = element("div");
    const grid = element("div", "charts");
    const rest = element("div");
    const others = element("details");
    const otherGrid = element("div", "charts");
    others.append(element("summary", "", "Every other number that the run records"), otherGrid);
    const zeros = element("details");
    const zeroGrid = element("div", "charts");
    zeros.append(element("summary", "", "Numbers that have stayed at 0"), zeroGrid);
    const find = element("input");
    find.type = "search";
    find.placeholder = "find charts";
    find.addEventListener("input", () => filter());
    let curves = {};
    let charts = [];
    let laidOut = null;
    let generation = facts.generation;
    let asked = new Set();
    let isAsking = false;
    let isStale = false;
    const controls = stapo.chartControls(params, facts.axes, (isNewData) => {
      if (isNewData) load(false);
      else draw();
    });
    const { state } = controls;
    state.extent = () => {
      const xs = (curves.step || EMPTY).x;
      return xs.length ? [xs[0], xs[xs.length - 1]] : [0, 1];
    };
    controls.bar.append(find);
    root.append(top, controls.bar, grid, rest, zeros, others);
    for (const details of [zeros, others]) details.addEventListener("toggle", () => draw());
    // A search opens what is folded, so that nothing that matches stays out of sight.
    const filter = () => {
      const word = find.value.toLowerCase();
      for (const { chart, drawn } of charts)
        drawn.figure.hidden = ![chart.title, chart.note, ...chart.keys].join(" ").toLowerCase().includes(word);
      if (word) zeros.open = others.open = true;
    };
    const isZero = (chart) =>
      !chart.isOther &&
      chart.bands.length === 0 &&
      chart.keys.every((key) => (curves[key] || EMPTY).x.length > 0 && curves[key].y.every((value) => value === 0));
    const folderOf = (chart) =>
      pins.includes(chart.id) ? null : chart.isOther ? others : isZero(chart) ? zeros : null;

    const draw = () => {
      const marks = marksOf(facts.events, curves.step);
      const view = { axis: stapo.runCharts.AXES[state.axis], range: state.range, smooth: state.smooth };
      for (const { chart, drawn } of charts)
        if (folderOf(chart)?.open !== false) drawn.show(dataOf(chart, curves, marks), view);
    };
    let pins = readPins();
    const repin = (change) => () => {
      change();
      writePins(pins);
      lay();
      draw();
    };
    const move = (id, by) => {
      const from = pins.indexOf(id);
      const to = stapo.between(0, from + by, pins.length - 1);
      pins.splice(to, 0, pins.splice(from, 1)[0]);
    };
    const toolsOf = ({ id }) => {
      const isPinned = pins.includes(id);
      const toggle = () => {
        pins = isPinned ? pins.filter((pin) => pin !== id) : [...pins, id];
      };
      const pin = [
        "pin",
        isPinned ? "takes this chart from the front" : "puts this chart in front",
        repin(toggle),
        isPinned,
      ];
      if (!isPinned) return [pin];
      return [
        pin,
        ["◀", "moves this chart forward", repin(() => move(id, -1))],
        ["▶", "moves this chart back", repin(() => move(id, 1))],
      ];
    };
    const lay = () => {
      const rank = ({ id }) => (pins.includes(id) ? pins.indexOf(id) : pins.length);
      const wanted = plan(facts.keys).sort((a, b) => rank(a) - rank(b));
      const signature = (chart) => [chart.id, ...chart.keys, pins.includes(chart.id)].join(" ");
      const layout = wanted.map((chart) => signature(chart) + " " + isZero(chart)).join("\n");
      if (layout === laidOut) return;
      laidOut = layout;
      // A chart that stays keeps its axis and its size.
      const known = new Map(charts.map((entry) => [entry.made, entry]));
      const make = (chart) => ({
        chart,
        made: signature(chart),
        drawn: stapo.chart({ ...chart, onRange: controls.setRange, tools: toolsOf(chart) }),
      });
      charts = wanted.map((chart) => known.get(signature(chart)) || make(chart));
      for (const { chart, drawn } of charts) drawn.figure.classList.toggle("pinned", pins.includes(chart.id));
      for (const [folder, place] of [
        [null, grid],
        [zeros, zeroGrid],
        [others, otherGrid],
      ]) {
        const figures = charts.filter(({ chart }) => folderOf(chart) === folder).map(({ drawn }) => drawn.figure);
        place.replaceChildren(...figures);
        if (folder) folder.hidden = !figures.length;
      }
      filter();
      if (!charts.length)
        grid.append(element("p", "missing", "No step has been finished yet; curves appear with the first."));
    };
    const below = () => {
      const isOpen = [...rest.querySelectorAll("details")].map((details) => details.open);
      const plan = element("details");
      plan.append(element("summary", "", "Plan"), element("pre", "", facts.plan));
      rest.replaceChildren(...[timeline(curves), happened(facts.events), plan].filter(Boolean));
      [...rest.querySelectorAll("details")].forEach((details, idx) => {
        details.open = isOpen[idx] || false;
      });
    };

    // Asks for what is new, or for everything where the axis, the window or the file changed.
    const nPoints = () => Math.max(200, Math.min(1000, Math.round(innerWidth / 2)));
    const load = async (isGrowing) => {
      if (isAsking) {
        isStale = true;
        return;
      }
      isAsking = true;
      try {
        facts = await ask("/api/run", { run });
        const wanted = ["step", ...facts.keys];
        const longest = (curves.step || EMPTY).x.length;
        // A key that was not asked for before needs all its points: steps may have been written between the questions.
        const isKnown = facts.generation === generation && wanted.every((key) => asked.has(key));
        const isAppended = isGrowing && isKnown && !state.range && longest > 0 && longest < 2 * nPoints();
        generation = facts.generation;
        const known = curves.step?.y.length ? curves.step.y[curves.step.y.length - 1] : null;
        const window = state.range ? { from: state.range[0], to: state.range[1] } : {};
        const answer = await ask("/api/series", {
          run,
          key: wanted,
          x: state.axis,
          points: nPoints(),
          after: isAppended ? known : null,
          ...window,
        });
        asked = new Set(wanted);
        const fresh = answer.runs[0].curves;
        if (isAppended && answer.runs[0].generation === generation) {
          for (const [key, curve] of Object.entries(fresh))
            curves[key] = curves[key] ? joined(curves[key], curve) : curve;
        } else curves = fresh;
        lay();
        head(top, run, facts, curves);
        draw();
        below();
      } finally {
        isAsking = false;
      }
      if (isStale) {
        isStale = false;
        await load(true);
      }
    };
    const joined = (curve, more) => {
      const low = curve.low?.length || more.low?.length;
      const ends = (one, name) => (one[name]?.length ? one[name] : one.y);
      return {
        x: [...curve.x, ...more.x],
        y: [...curve.y, ...more.y],
        low: low ? [...ends(curve, "low"), ...ends(more, "low")] : [],
        high: low ? [...ends(curve, "high"), ...ends(more, "high")] : [],
      };
    };
    await load(false);
    return {
      key: controls.key,
      update: (changed) => {
        if (changed.has(run)) load(true).catch((error) => head(top, run, { ...facts, problem: error.message }));
      },
    };
  };
})();
