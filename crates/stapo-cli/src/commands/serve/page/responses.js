"use strict";
// Recorded responses: problems with their whole groups, differences between two responses, and the token viewer.
(() => {
  const { element, number } = stapo;
  const { views, ask, anchor, remember, at } = stapo.app;
  // The comparison of two responses is quadratic in their words.
  const MAX_WORDS = 1500;

  const verdictOf = (response) =>
    element("b", response.verdict === "right" ? "right" : "wrong", response.verdict.replace("_", " "));

  // The words of `a` and `b` aligned by their longest common subsequence: [kind, text] with kind "=", "-" or "+".
  const difference = (a, b) => {
    const [before, after] = [a, b].map((text) => (text.match(/\s+|[^\s]+/g) || []).slice(0, MAX_WORDS));
    const lengths = Array.from({ length: before.length + 1 }, () => new Uint16Array(after.length + 1));
    for (let i = before.length - 1; i >= 0; i -= 1) {
      for (let j = after.length - 1; j >= 0; j -= 1) {
        lengths[i][j] =
          before[i] === after[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
      }
    }
    const parts = [];
    const add = (kind, text) => {
      if (parts.length && parts[parts.length - 1][0] === kind) parts[parts.length - 1][1] += text;
      else parts.push([kind, text]);
    };
    let [i, j] = [0, 0];
    while (i < before.length || j < after.length) {
      if (i < before.length && j < after.length && before[i] === after[j]) {
        add("=", before[i]);
        i += 1;
        j += 1;
      } else if (j >= after.length || (i < before.length && lengths[i + 1][j] >= lengths[i][j + 1])) {
        add("-", before[i]);
        i += 1;
      } else {
        add("+", after[j]);
        j += 1;
      }
    }
    return parts;
  };
  stapo.difference = difference;

  // A text with every occurrence of `find` marked.
  const marked = (text, find) => {
    const box = element("div", "text");
    if (!find) {
      box.textContent = text;
      return box;
    }
    const lower = text.toLowerCase();
    let from = 0;
    for (let found = lower.indexOf(find); found >= 0; found = lower.indexOf(find, from)) {
      box.append(text.slice(from, found), element("mark", "", text.slice(found, found + find.length)));
      from = found + find.length;
    }
    box.append(text.slice(from));
    return box;
  };

  const FILTERS = {
    "": () => true,
    right: (r) => r.verdict === "right",
    "not right": (r) => r.verdict !== "right",
    "no answer": (r) => r.verdict === "no_answer",
    silenced: (r) => r.n_silenced > 0,
    clipped: (r) => r.n_clipped > 0,
    truncated: (r) => r.finish.kind === "length_limit",
  };

  // The slider and arrows over the recorded steps.
  const stepper = (steps, step, silenced, go) => {
    const box = element("label", "", "step ");
    const slider = element("input");
    Object.assign(slider, {
      type: "range",
      min: 0,
      max: Math.max(0, steps.length - 1),
      step: 1,
      value: Math.max(0, steps.indexOf(step)),
    });
    const shown = element("output");
    const tell = (idx) => {
      shown.textContent = steps[idx] + (silenced.includes(steps[idx]) ? " (silenced tokens)" : "");
    };
    tell(Number(slider.value));
    slider.addEventListener("input", () => tell(Number(slider.value)));
    slider.addEventListener("change", () => go(steps[Number(slider.value)]));
    box.append(slider, shown);
    box.move = (by) => {
      const idx = stapo.between(0, Number(slider.value) + by, steps.length - 1);
      slider.value = idx;
      tell(idx);
      go(steps[idx]);
    };
    return box;
  };
  // A step with silenced tokens says most; without one the last step is shown.
  const firstStep = (facts, wanted) => {
    const steps = facts.recorded_steps;
    if (steps.includes(wanted)) return wanted;
    const silenced = steps.filter((step) => facts.silenced_steps.includes(step));
    return silenced.length ? silenced[silenced.length - 1] : steps[steps.length - 1];
  };
  const titled = (run, what) => {
    const bar = element("div", "bar");
    const title = element("h2");
    title.append(anchor(run, "run", { run }), " · " + what);
    bar.append(title);
    return bar;
  };

  views.responses = async (root, params) => {
    const run = params.get("run") || "";
    const facts = await ask("/api/run", { run });
    const bar = titled(run, "responses");
    root.append(bar);
    if (!facts.recorded_steps.length) {
      root.append(
        element(
          "p",
          "missing",
          "No recorded responses yet: a run records them in step 1 and every record.responses_every_steps.",
        ),
      );
      return {};
    }
    const state = {
      step: firstStep(facts, Number(params.get("step"))),
      problem: params.get("problem") || "",
      find: params.get("find") || "",
      filter: params.get("filter") || "",
      pair: [],
    };
    let responses = [];
    const find = Object.assign(element("input"), { type: "search", placeholder: "search in texts", value: state.find });
    const filter = element("select");
    for (const name of Object.keys(FILTERS))
      filter.append(new Option(name || "every response", name, false, name === state.filter));
    const count = element("span", "note");
    const slider = stepper(facts.recorded_steps, state.step, facts.silenced_steps, (step) => {
      state.step = step;
      state.pair = [];
      remember({ step });
      load();
    });
    bar.append(slider, find, filter, count);
    const split = element("div", "split");
    const list = element("ul", "problems");
    const group = element("div");
    split.append(list, group);
    root.append(split);

    const isShown = (r) =>
      FILTERS[state.filter](r) &&
      (!state.find || (r.text + "\n" + r.prompt).toLowerCase().includes(state.find.toLowerCase()));
    const problems = () => {
      const found = new Map();
      for (const r of responses) {
        if (!found.has(r.problem)) found.set(r.problem, []);
        found.get(r.problem).push(r);
      }
      return found;
    };

    const card = (r) => {
      const box = element("article", state.pair.includes(r.sample) ? "chosen" : "");
      const title = element("h3", "", "#" + r.sample + " ");
      title.append(
        verdictOf(r),
        element("span", "", "reward " + number(r.reward)),
        element("span", "", "A " + number(r.advantage)),
        element("span", "", r.n_tokens + " tokens" + (r.finish.kind === "length_limit" ? ", cut" : "")),
      );
      if (r.n_turns) {
        const isCut = r.finish.kind === "turn_limit" ? ", out of turns" : "";
        title.append(element("span", "", r.n_turns + " turns, " + r.n_calls + " calls" + isCut));
      }
      if (r.n_silenced) title.append(element("span", "wrong", r.n_silenced + " silenced"));
      if (r.n_clipped) title.append(element("span", "", r.n_clipped + " clipped"));
      const tools = element("div", "bar");
      const box2 = Object.assign(element("input"), { type: "checkbox", checked: state.pair.includes(r.sample) });
      box2.addEventListener("change", () => {
        state.pair = box2.checked
          ? [...state.pair, r.sample].slice(-2)
          : state.pair.filter((sample) => sample !== r.sample);
        draw();
      });
      const label = element("label", "", "");
      label.append(box2, " compare");
      tools.append(anchor("tokens", "tokens", { run, step: state.step, problem: r.problem, sample: r.sample }), label);
      const shown = [...stapo.program(r.program), ...stapo.opinion(r.judge)];
      box.append(title, marked(r.text, state.find.toLowerCase()), ...shown, tools);
      return box;
    };
    const compared = (members) => {
      const pair = state.pair.map((sample) => members.find((r) => r.sample === sample)).filter(Boolean);
      if (pair.length < 2) return null;
      const box = element("article", "diff");
      box.append(element("h3", "", "#" + pair[0].sample + " → #" + pair[1].sample));
      const text = element("div", "text");
      for (const [kind, part] of difference(pair[0].text, pair[1].text))
        text.append(kind === "=" ? part : element(kind === "-" ? "del" : "ins", "", part));
      box.append(text);
      return box;
    };

    const draw = () => {
      const found = problems();
      const shown = [...found].filter(([, members]) => members.some(isShown));
      const silenced = shown.find(([, members]) => members.some((r) => r.n_silenced > 0));
      if (!shown.some(([id]) => id === state.problem)) state.problem = (silenced || shown[0] || [""])[0];
      remember({ problem: state.problem });
      list.replaceChildren(
        ...shown.slice(0, 500).map(([id, members]) => {
          const item = element("li");
          const button = element("button");
          button.type = "button";
          if (id === state.problem) button.setAttribute("aria-current", "true");
          const nRight = members.filter((r) => r.verdict === "right").length;
          const dots = element("span", "dots");
          for (const r of members.slice(0, 32))
            dots.append(element("span", r.verdict === "right" ? "right" : "wrong", r.verdict === "right" ? "●" : "○"));
          const nSilenced = members.reduce((sum, r) => sum + r.n_silenced, 0);
          button.append(
            element("span", "ask", members[0].prompt),
            dots,
            element(
              "span",
              "note",
              " " + nRight + " of " + members.length + " right" + (nSilenced ? ", " + nSilenced + " silenced" : ""),
            ),
          );
          button.addEventListener("click", () => {
            state.problem = id;
            state.pair = [];
            draw();
          });
          item.append(button);
          return item;
        }),
      );
      const members = found.get(state.problem) || [];
      const cards = element("div", "group");
      cards.append(...members.filter(isShown).map(card));
      const head = element("p", "prompt");
      if (members.length)
        head.append(
          element("b", "", state.problem + "  "),
          members[0].prompt,
          element("span", "note", "   reference: " + members[0].reference),
        );
      head.classList.add("text");
      group.replaceChildren(...[head, compared(members), cards].filter(Boolean));
      count.textContent =
        responses.filter(isShown).length + " of " + responses.length + " responses, " + shown.length + " problems";
    };
    const load = async () => {
      try {
        responses = (await ask("/api/responses", { run, step: state.step })).responses;
        draw();
      } catch (error) {
        group.replaceChildren(element("p", "problem", error.message));
      }
    };
    find.addEventListener("input", () => {
      state.find = find.value;
      remember({ find: state.find });
      draw();
    });
    filter.addEventListener("change", () => {
      state.filter = filter.value;
      remember({ filter: state.filter });
      draw();
    });
    await load();
    return {
      key: (event) => {
        if (event.key === "ArrowLeft") slider.move(-1);
        else if (event.key === "ArrowRight") slider.move(1);
      },
    };
  };

  views.tokens = async (root, params) => {
    const run = params.get("run") || "";
    const facts = await ask("/api/run", { run });
    const bar = titled(run, "tokens");
    root.append(bar);
    const step = firstStep(facts, Number(params.get("step")));
    if (step === undefined) {
      root.append(element("p", "missing", "No recorded responses yet."));
      return {};
    }
    const problem = params.get("problem");
    const go = (next) => {
      location.hash = stapo.app.link("tokens", { run, step: next });
    };
    const slider = stepper(facts.recorded_steps, step, facts.silenced_steps, go);
    bar.append(slider, anchor("responses of this step", "responses", { run, step }));
    const recorded = await ask("/api/tokens", { run, step });
    if (problem !== null) {
      const sample = params.get("sample");
      const isWanted = (r) => r.problem === problem && (sample === null || String(r.sample) === sample);
      recorded.responses.sort((a, b) => Number(isWanted(b)) - Number(isWanted(a)));
    }
    const box = element("div");
    box.append(at("viewer-parts").content.cloneNode(true));
    root.append(box);
    stapo.viewer(box, recorded, problem !== null ? "recorded" : "silenced");
    return {
      key: (event) => {
        if (event.key === "ArrowLeft") slider.move(-1);
        else if (event.key === "ArrowRight") slider.move(1);
      },
    };
  };
})();
