"use strict";
// The recorded responses of all steps in one table, and how the answers to one problem changed over training.
(() => {
  const { element, number } = stapo;
  const { views, ask, anchor, remember } = stapo.app;
  const VERDICTS = ["", "right", "not_right", "wrong", "no_answer", "unparsable", "over_budget"];
  const RANGES = [
    ["step", "step"],
    ["reward", "reward"],
    ["tokens", "tokens"],
  ];

  // One dot for each response, step by step.
  const history = (responses) => {
    const steps = new Map();
    for (const r of responses) steps.set(r.step, [...(steps.get(r.step) || []), r]);
    const box = element("div", "history");
    for (const [step, members] of steps) {
      const entry = element("span");
      const nRight = members.filter((r) => r.verdict === "right").length;
      const dots = element("span", "dots");
      for (const r of members.slice(0, 32))
        dots.append(element("span", r.verdict === "right" ? "right" : "wrong", r.verdict === "right" ? "●" : "○"));
      entry.append("step " + step + " ", dots, element("span", "note", " " + nRight + " of " + members.length));
      box.append(entry);
    }
    return box;
  };

  views.samples = async (root, params) => {
    const run = params.get("run") || "";
    const state = { run };
    for (const name of ["verdict", "text", "problem", ...RANGES.flatMap(([key]) => [key + "_from", key + "_to"])])
      state[name] = params.get(name) || "";
    const bar = element("div", "bar");
    const title = element("h2");
    title.append(anchor(run, "run", { run }), " · samples of all steps");
    const count = element("span", "note");
    bar.append(title);
    const body = element("div");
    root.append(bar, body);
    let timer = null;
    const changed = (name, value) => {
      state[name] = value;
      remember({ [name]: value });
      clearTimeout(timer);
      timer = setTimeout(() => load(), 250);
    };
    const field = (name, made) => {
      made.value = state[name];
      made.addEventListener("input", () => changed(name, made.value));
      return made;
    };
    const verdict = element("select");
    for (const name of VERDICTS) verdict.append(new Option(name ? name.replace("_", " ") : "every verdict", name));
    const search = (placeholder) => Object.assign(element("input"), { type: "search", placeholder });
    bar.append(field("verdict", verdict), field("text", search("search in texts")));
    const problem = field("problem", search("problem"));
    bar.append(problem);
    for (const [key, label] of RANGES) {
      const box = element("label", "", label + " ");
      for (const end of ["_from", "_to"]) {
        const bound = Object.assign(element("input", "short"), {
          type: "number",
          step: "any",
          placeholder: end === "_from" ? "from" : "to",
        });
        box.append(field(key + end, bound), " ");
      }
      bar.append(box);
    }
    bar.append(count);

    // On a phone a row is a card, without the head of its columns.
    const titled = (title, text) => {
      const cell = element("td", "n", text);
      cell.dataset.title = title;
      return cell;
    };
    const rowOf = (r) => {
      const made = element("tr");
      const asked = element("button", "link", r.problem);
      asked.type = "button";
      asked.title = "the history of this problem";
      asked.addEventListener("click", () => {
        problem.value = r.problem;
        changed("problem", r.problem);
      });
      const name = element("td", "name");
      name.append(asked);
      const text = element("td");
      text.append(element("div", "text", r.text));
      made.append(
        titled("step", String(r.step)),
        name,
        element("td", r.verdict === "right" ? "right" : "wrong", r.verdict.replace("_", " ")),
        titled("reward", number(r.reward)),
        titled("tokens", r.n_tokens + (r.finish.kind === "length_limit" ? ", cut" : "")),
        text,
      );
      const tokens = element("td");
      tokens.append(anchor("tokens", "tokens", { run, step: r.step, problem: r.problem, sample: r.sample }));
      made.append(tokens);
      return made;
    };
    const load = async () => {
      try {
        const { responses, n_found, n_read } = await ask("/api/samples", state);
        const parts = [];
        if (state.problem && responses.length) {
          const first = responses[0];
          const asked = element("p", "prompt text", first.prompt);
          asked.append(element("span", "note", "   reference: " + first.reference));
          parts.push(asked, history(responses));
        }
        const table = element("table", "samples");
        const head = element("tr");
        for (const [name, isNumber] of [
          ["step", true],
          ["problem"],
          ["verdict"],
          ["reward", true],
          ["tokens", true],
          ["response"],
          [""],
        ])
          head.append(element("th", isNumber ? "n" : "", name));
        table.append(head, ...responses.map(rowOf));
        const scroll = element("div", "scroll");
        scroll.append(table);
        body.replaceChildren(...parts, scroll);
        count.textContent =
          n_found +
          " of " +
          n_read +
          " responses" +
          (responses.length < n_found ? ", the first " + responses.length + " shown" : "");
      } catch (error) {
        body.replaceChildren(element("p", "problem", error.message));
      }
    };
    await load();
    return { leave: () => clearTimeout(timer) };
  };
})();
