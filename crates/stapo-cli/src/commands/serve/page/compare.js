"use strict";
// Runs over one another.
(() => {
  const { element } = stapo;
  const { rows, views, ask, anchor } = stapo.app;
  const EVERY_MS = 2000;

  // A table of the server.
  stapo.table = ({ title, head, rows: lines }) => {
    const box = element("section");
    box.append(element("h3", "", title));
    const table = element("table");
    const first = element("tr");
    for (const column of head) first.append(element("th", column.is_number ? "n" : "", column.title));
    const thead = element("thead");
    thead.append(first);
    const body = element("tbody");
    for (const cells of lines) {
      const line = element("tr");
      cells.forEach((cell, idx) => line.append(element("td", head[idx].is_number ? "n" : "", cell)));
      body.append(line);
    }
    table.append(thead, body);
    const scroll = element("div", "scroll");
    scroll.append(table);
    box.append(scroll);
    return box;
  };

  const scaled = (curve, scale) => {
    const by = (values) => (values && scale !== undefined ? values.map((value) => scale * value) : values);
    return { x: curve.x, y: by(curve.y), low: by(curve.low), high: by(curve.high) };
  };
  const dataOf = (chart, arms) => {
    const lines = [];
    arms.forEach((arm, series) => {
      const runs = Object.entries(arm.runs).filter(([, curve]) => curve.x.length);
      const key = String(series);
      const hasMean = arm.mean.x.length > 0;
      for (const [id, curve] of runs) {
        const shown = scaled(curve, chart.scale);
        lines.push({
          key,
          series,
          label: runs.length > 1 ? id : arm.name,
          ...shown,
          isThin: hasMean,
          low: hasMean ? [] : shown.low,
          high: hasMean ? [] : shown.high,
        });
      }
      if (hasMean)
        lines.push({
          key,
          series,
          label: arm.name + " (mean of " + runs.length + ")",
          ...scaled(arm.mean, chart.scale),
        });
    });
    return { lines, bands: [], marks: [] };
  };

  // The page without runs: which could be compared.
  const choose = (root) => {
    root.append(element("p", "", "Choose runs in the list, or an experiment:"));
    const list = element("ul");
    for (const experiment of new Set(
      [...rows.values()].map((row) => row.experiment).filter((id) => id !== undefined),
    )) {
      const item = element("li");
      item.append(anchor(experiment === "." ? "this experiment" : experiment, "compare", { experiment }));
      list.append(item);
    }
    const item = element("li");
    item.append(anchor("the list of runs", "runs"));
    list.append(item);
    root.append(list);
  };

  views.compare = async (root, params) => {
    const chosen = { run: params.getAll("run"), experiment: params.get("experiment") };
    if (!chosen.run.length && chosen.experiment === null) {
      choose(root);
      return {};
    }
    let facts = await ask("/api/compare", chosen);
    const top = element("div", "bar");
    top.append(
      element(
        "h2",
        "",
        chosen.experiment !== null
          ? "experiment " + (chosen.experiment === "." ? "here" : chosen.experiment)
          : facts.arms.reduce((n, arm) => n + arm.runs.length, 0) + " runs",
      ),
    );
    const add = element("input");
    Object.assign(add, { type: "search", placeholder: "add a run" });
    add.setAttribute("list", "all-runs");
    const options = element("datalist");
    options.id = "all-runs";
    for (const id of rows.keys()) options.append(new Option(id));
    if (chosen.experiment === null) top.append(add, options);
    add.addEventListener("change", () => {
      if (rows.has(add.value))
        location.hash = stapo.app.link("compare", { run: [...new Set([...chosen.run, add.value])] });
    });
    const names = element("div", "keysof");
    facts.arms.forEach((arm, idx) => {
      const entry = element("span");
      const swatch = element("i");
      swatch.style.background = "var(--s" + (idx % 6) + ")";
      entry.append(swatch, arm.name + " ");
      for (const id of arm.runs) entry.append(anchor(id === arm.name ? "open" : id, "run", { run: id }), " ");
      if (chosen.experiment === null && facts.arms.length > 1)
        entry.append(anchor("×", "compare", { run: chosen.run.filter((id) => !arm.runs.includes(id)) }));
      names.append(entry);
    });
    const grid = element("div", "charts");
    const tables = element("div");
    const controls = stapo.chartControls(params, ["step", "updates", "tokens", "hours"], (isNewData) => {
      if (isNewData) load();
      else draw();
    });
    root.append(top, names, controls.bar, grid, tables);
    const charts = stapo.runCharts
      .plan(facts.keys)
      .filter((chart) => !chart.isOther && chart.keys.length)
      .flatMap((chart) =>
        chart.keys.slice(0, 2).map((key) => ({
          ...chart,
          key,
          id: "compare-" + key.replace(/[^a-z0-9]/gi, "-"),
          title: chart.keys.length > 1 ? chart.title + ": " + stapo.runCharts.label(key) : chart.title,
        })),
      );
    const drawn = charts.map((chart) => stapo.chart({ ...chart, onRange: controls.setRange }));
    grid.append(...drawn.map((one) => one.figure));
    let curves = {};
    controls.state.extent = () => {
      const xs = Object.values(curves)
        .flat()
        .flatMap((arm) => Object.values(arm.runs))
        .filter((curve) => curve.x.length)
        .flatMap((curve) => [curve.x[0], curve.x[curve.x.length - 1]]);
      return xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
    };
    const draw = () => {
      const view = {
        axis: stapo.runCharts.AXES[controls.state.axis],
        range: controls.state.range,
        smooth: controls.state.smooth,
      };
      charts.forEach((chart, idx) => drawn[idx].show(dataOf(chart, curves[chart.key] || []), view));
    };
    const load = async () => {
      const { axis, range } = controls.state;
      const window = range ? { from: range[0], to: range[1] } : {};
      curves = await ask("/api/compare/curves", {
        ...chosen,
        key: charts.map((chart) => chart.key),
        x: axis,
        points: 400,
        ...window,
      });
      draw();
    };
    const tell = () => {
      tables.replaceChildren(...facts.tables.map(stapo.table));
      if (facts.problem) tables.append(element("p", "missing", "No statistics: " + facts.problem));
    };
    tell();
    await load();
    // Many runs change at a time: what is new is asked for every two seconds at most, statistics every tenth time.
    const members = new Set(facts.arms.flatMap((arm) => arm.runs));
    let isDue = false;
    let n = 0;
    const timer = setInterval(async () => {
      if (!isDue) return;
      isDue = false;
      n += 1;
      try {
        await load();
        if (n % 10 === 0) {
          facts = await ask("/api/compare", chosen);
          tell();
        }
      } catch {
        isDue = true;
      }
    }, EVERY_MS);
    return {
      key: controls.key,
      leave: () => clearInterval(timer),
      update: (changed) => {
        if ([...changed].some((id) => members.has(id))) isDue = true;
      },
    };
  };
})();
