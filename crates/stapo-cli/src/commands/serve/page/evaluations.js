"use strict";
// Evaluations: results with intervals, and every question over the steps.
(() => {
  const { element, number } = stapo;
  const { rows, views, ask, anchor, remember } = stapo.app;

  const percent = (estimate) => {
    const value = (100 * estimate.value).toFixed(1);
    return estimate.interval
      ? value +
          " (" +
          (100 * Math.max(0, estimate.interval.low)).toFixed(1) +
          " to " +
          (100 * Math.min(1, estimate.interval.high)).toFixed(1) +
          ")"
      : value;
  };
  const stepName = (step) => (step === null ? "model" : "step " + step);
  const ends = (programs) =>
    Object.entries(programs)
      .map(([end, n]) => n + " " + end.replace("_", " "))
      .join(", ");
  const results = (one) =>
    stapo.table({
      title: one.benchmark + ", " + one.decoding,
      head: [
        ["step"],
        ["avg@k, % (95 % interval)", true],
        ["k", true],
        ["questions", true],
        ["maj@k, %", true],
        ["truncated, %", true],
        ["no answer, %", true],
        ["tokens", true],
        ...(one.results.some((row) => row.programs) ? [["ends of programs"]] : []),
      ].map(([title, isNumber]) => ({ title, is_number: Boolean(isNumber) })),
      rows: one.results.map((row, idx) => [
        stepName(one.steps[idx]),
        percent(row.avg),
        String(row.n_samples),
        String(row.n_questions),
        row.maj ? (100 * row.maj.value).toFixed(1) : "–",
        (100 * row.truncated_share).toFixed(1),
        (100 * row.no_answer_share).toFixed(1),
        number(row.response_tokens_mean),
        ...(row.programs ? [ends(row.programs)] : []),
      ]),
    });

  // A question has flipped where its majority of samples changed between two steps.
  const flips = (question) => {
    const known = question.shares.map((share, idx) => [share, idx]).filter(([share]) => share !== null);
    const found = [];
    for (let i = 1; i < known.length; i += 1)
      if (known[i][0] > 0.5 !== known[i - 1][0] > 0.5)
        found.push({ from: known[i - 1][1], to: known[i][1], isRight: known[i][0] > 0.5 });
    return found;
  };
  stapo.flips = flips;

  const questions = (one, state) => {
    const box = element("details");
    box.open = true;
    const all = one.questions.map((question) => ({ question, flips: flips(question) }));
    const flipped = all.filter((entry) => entry.flips.length);
    box.append(
      element("summary", "", one.questions.length + " questions, " + flipped.length + " flipped between steps"),
    );
    const shown = (state.only === "flipped" ? flipped : all).filter(
      ({ question }) => !state.find || (question.id + " " + question.reference).toLowerCase().includes(state.find),
    );
    const table = element("table");
    const head = element("tr");
    head.append(
      element("th", "", "question"),
      ...one.steps.map((step) => element("th", "n", stepName(step))),
      element("th", "", "flips"),
      element("th", "", "reference"),
    );
    table.append(head);
    for (const { question, flips: own } of shown.slice(0, 500)) {
      const line = element("tr");
      line.append(element("td", "", question.id));
      for (const share of question.shares) {
        const cell = element("td", "n", share === null ? "–" : (100 * share).toFixed(0) + " %");
        if (share !== null)
          cell.style.background = "color-mix(in srgb, var(--s2) " + Math.round(45 * share) + "%, transparent)";
        line.append(cell);
      }
      const flips = element("td");
      for (const flip of own)
        flips.append(
          element(
            "span",
            flip.isRight ? "flip-up" : "flip-down",
            (flip.isRight ? "▲ right at " : "▼ wrong at ") + stepName(one.steps[flip.to]) + " ",
          ),
        );
      line.append(flips, element("td", "", question.reference));
      table.append(line);
    }
    const scroll = element("div", "scroll");
    scroll.append(table);
    box.append(scroll);
    return box;
  };

  const overTime = (one) => {
    const points = one.results.map((row, idx) => [one.steps[idx], row.avg]).filter(([step]) => step !== null);
    if (points.length < 2) return null;
    const chart = stapo.chart({
      id: "evaluation-" + one.benchmark.replace(/[^a-z0-9]/gi, "-"),
      title: one.benchmark,
      note: "avg@k, with 95 % intervals clustered by question",
      unit: "%",
      onRange: () => {},
    });
    const ends = (name, otherwise) =>
      points.map(([, avg]) => 100 * (avg.interval ? avg.interval[name] : otherwise(avg)));
    return {
      chart,
      show: () =>
        chart.show(
          {
            lines: [
              {
                key: "0",
                series: 0,
                label: one.decoding,
                x: points.map(([step]) => step),
                y: points.map(([, avg]) => 100 * avg.value),
                low: ends("low", (avg) => avg.value),
                high: ends("high", (avg) => avg.value),
              },
            ],
            bands: [],
            marks: [],
          },
          { axis: "step", range: null, smooth: 0 },
        ),
    };
  };

  views.evaluations = async (root, params) => {
    const run = params.get("run");
    const evaluated = [...rows.values()].filter((row) => row.is_evaluated);
    if (run === null) {
      root.append(element("h2", "", "Evaluations"));
      if (!evaluated.length)
        root.append(
          element(
            "p",
            "missing",
            "No run here has evaluations. `stapo eval --model RUN --out RUN/eval/NAME` makes one.",
          ),
        );
      for (const row of evaluated.slice(0, 50)) {
        const answer = await ask("/api/evaluations", { run: row.id });
        const title = element("h3");
        title.append(anchor(row.id, "evaluations", { run: row.id }));
        root.append(title, ...answer.benchmarks.map(results));
      }
      return {};
    }
    const state = { only: params.get("only") || "all", find: params.get("find") || "" };
    const answer = await ask("/api/evaluations", { run });
    const bar = element("div", "bar");
    const title = element("h2");
    title.append(anchor(run, "run", { run }), " · evaluations");
    const only = element("select");
    for (const [value, text] of [
      ["all", "every question"],
      ["flipped", "flipped questions"],
    ])
      only.append(new Option(text, value, false, value === state.only));
    const find = Object.assign(element("input"), { type: "search", placeholder: "find a question", value: state.find });
    bar.append(title, only, find);
    const body = element("div");
    root.append(bar, body);
    const draw = () => {
      const parts = [];
      const charts = answer.benchmarks.map(overTime).filter(Boolean);
      const grid = element("div", "charts");
      grid.append(...charts.map(({ chart }) => chart.figure));
      for (const one of answer.benchmarks)
        parts.push(results(one), questions(one, { ...state, find: state.find.toLowerCase() }));
      body.replaceChildren(grid, ...parts);
      charts.forEach(({ show }) => show());
      if (!answer.benchmarks.length)
        body.append(
          element(
            "p",
            "missing",
            "This run has no evaluations yet. `stapo eval --model " + run + " --out " + run + "/eval/NAME` makes one.",
          ),
        );
    };
    only.addEventListener("change", () => {
      state.only = only.value;
      remember({ only: state.only });
      draw();
    });
    find.addEventListener("input", () => {
      state.find = find.value;
      remember({ find: state.find });
      draw();
    });
    draw();
    return {};
  };
})();
