"use strict";
// The list of runs.
(() => {
  const { element, number } = stapo;
  const { rows, views, ask, anchor, remember, duration, badge } = stapo.app;
  const MAX_ROWS = 300;
  const MAX_TAGGED = 100;
  const MAX_TAGS = 3;

  // Title, the number by which the list is sorted, and for numbers of the catalogue key and notation.
  const listed = stapo.catalogue.listed.map((wanted) => {
    const { key, short, unit, scale } = stapo.catalogue.metrics.find((metric) => metric.key === wanted);
    const shown = unit === "%" ? (value) => (scale * value).toFixed(1) + " %" : number;
    return [short, (row) => -(row.last[key] ?? -Infinity), key, shown];
  });
  const COLUMNS = [
    ["run", (row) => row.id],
    ["state", (row) => ["running", "died", "broken", "stopped", "done"].indexOf(row.status.kind)],
    ["progress", (row) => -(row.steps ? row.step / row.steps : 0)],
    ...listed,
    ["written", (row) => -row.written],
  ];

  const progress = (row) => {
    const cell = element("td");
    if (row.steps) {
      const track = element("span", "progress");
      const done = element("i");
      done.style.width = Math.min(100, (100 * row.step) / row.steps) + "%";
      track.append(done);
      cell.append(track);
    }
    cell.append(row.step + (row.steps ? " / " + row.steps : ""));
    if (row.seconds_left !== null && row.status.kind === "running")
      cell.append(element("span", "note", ", " + duration(row.seconds_left) + " left"));
    return cell;
  };

  // Mean and standard deviation of a number over runs, as the list writes numbers.
  const spread = (values, shown) => {
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    if (values.length < 2) return shown(mean);
    const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
    return shown(mean) + " ± " + shown(Math.sqrt(squares / (values.length - 1))).replace(" %", "");
  };
  stapo.spread = spread;

  const line = (row, chosen, tags, hide) => {
    const made = element("tr");
    made.dataset.id = row.id;
    const name = element("td", "name");
    const box = element("input");
    box.type = "checkbox";
    box.checked = chosen.has(row.id);
    box.title = "choose this run for a comparison";
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(row.id);
      else chosen.delete(row.id);
      box.dispatchEvent(new CustomEvent("chosen", { bubbles: true }));
    });
    name.append(box, " ", anchor(row.id, "run", { run: row.id }));
    if (row.n_warnings) name.append(" ", element("span", "wrong", "⚠ " + row.n_warnings));
    for (const tag of row.tags || []) name.append(" ", element("span", "tag own", tag));
    if (row.note) name.append(element("div", "note", row.note));
    if (tags.length) {
      // Without its table a key is short enough to be seen; the whole name is under the pointer.
      const shown = tags.slice(0, MAX_TAGS).map((tag) => element("span", "tag", tag.replace(/^[a-z_]+\./, "")));
      if (tags.length > MAX_TAGS) shown.push(element("span", "tag", "+ " + (tags.length - MAX_TAGS)));
      shown.forEach((tag) => {
        tag.title = tags.join("\n");
      });
      const line = element("div", "tags");
      line.append(...shown);
      name.append(line);
    }
    const state = element("td");
    state.append(badge(row));
    if (["died", "broken"].includes(row.status.kind)) state.append(element("span", "why", row.status.text));
    made.append(name, state, progress(row));
    COLUMNS.forEach(([title, , key, shown], idx) => {
      if (!key) return;
      const cell = element("td", "n");
      // A card on a phone has no head of columns.
      cell.dataset.title = title;
      cell.hidden = hide.has(title);
      if (row.last[key] !== undefined) cell.append(shown(row.last[key]), stapo.spark(row.sparks[key] || [], idx % 6));
      made.append(cell);
    });
    const age = Date.now() / 1000 - row.written;
    made.append(element("td", "n", row.written ? duration(Math.max(0, age)) + " ago" : "–"));
    return made;
  };

  views.runs = (root, params) => {
    const state = {
      find: params.get("find") || "",
      kind: params.get("state") || "",
      // The newest run first, unless asked otherwise.
      sort: Number(params.get("sort") ?? COLUMNS.length - 1),
      isDown: params.get("down") === "1",
      group: params.get("group") || "",
      hide: new Set(params.getAll("hide")),
      hasArchived: params.get("archived") === "1",
      most: MAX_ROWS,
    };
    const chosen = new Set(params.getAll("run"));
    const bar = element("div", "bar");
    const find = element("input", "grow");
    find.type = "search";
    find.placeholder = "find runs by name or setting";
    find.value = state.find;
    const kinds = element("select");
    for (const kind of ["", "running", "done", "stopped", "died", "broken"])
      kinds.append(new Option(kind || "every state", kind, false, kind === state.kind));
    const compare = element("a", "", "");
    const counts = element("span", "note");
    const groups = element("select");
    groups.title = "groups the runs by a setting, with mean and spread";
    const columns = element("details", "columns");
    columns.append(element("summary", "", "columns"));
    for (const [title] of listed) {
      const label = element("label", "", "");
      const box = Object.assign(element("input"), { type: "checkbox", checked: !state.hide.has(title) });
      box.addEventListener("change", () => {
        if (box.checked) state.hide.delete(title);
        else state.hide.add(title);
        remember({ hide: [...state.hide] });
        draw();
      });
      label.append(box, " " + title);
      columns.append(label);
    }
    const archived = element("label", "", "");
    const archivedBox = Object.assign(element("input"), { type: "checkbox", checked: state.hasArchived });
    archivedBox.addEventListener("change", () => {
      state.hasArchived = archivedBox.checked;
      remember({ archived: state.hasArchived ? "1" : null });
      draw();
    });
    archived.append(archivedBox, " archived");
    groups.addEventListener("change", () => {
      state.group = groups.value;
      remember({ group: state.group });
      draw();
    });
    bar.append(find, kinds, groups, columns, archived, compare, counts);
    const scroll = element("div", "scroll");
    const table = element("table", "list");
    const head = element("tr");
    COLUMNS.forEach(([title], idx) => {
      const cell = element("th", COLUMNS[idx][2] || title === "written" ? "n" : "");
      const button = element("button", "", title);
      button.type = "button";
      button.addEventListener("click", () => {
        state.isDown = state.sort === idx && !state.isDown;
        state.sort = idx;
        remember({ sort: idx, down: state.isDown ? "1" : null });
        draw();
      });
      cell.append(button);
      head.append(cell);
    });
    const body = element("tbody");
    const more = element("button", "", "show more runs");
    more.addEventListener("click", () => {
      state.most += MAX_ROWS;
      draw();
    });
    const thead = element("thead");
    thead.append(head);
    table.append(thead, body);
    scroll.append(table);
    root.append(bar, scroll, more);

    let tags = new Map();
    let settings = new Map();
    let taggedFor = "";
    const matching = () => {
      const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
      const text = (row) =>
        [row.id, row.arm || "", row.note || "", ...(row.tags || []), ...(tags.get(row.id) || [])]
          .join(" ")
          .toLowerCase();
      return [...rows.values()].filter(
        (row) =>
          (state.hasArchived || !row.is_archived) &&
          (!state.kind || row.status.kind === state.kind) &&
          words.every((word) => text(row).includes(word)),
      );
    };
    const sorted = (found) => {
      const [, sortKey] = COLUMNS[state.sort];
      const sign = state.isDown ? -1 : 1;
      const order = (a, b) => {
        const [x, y] = [sortKey(a), sortKey(b)];
        return x < y ? -1 : x > y ? 1 : 0;
      };
      return found.sort((a, b) => sign * order(a, b) || a.id.localeCompare(b.id));
    };

    // What differs between the runs that are shown is next to each name.
    const tag = async (found) => {
      const ids = found.map((row) => row.id);
      const asked = ids.join("\n");
      if (asked === taggedFor) return;
      taggedFor = asked;
      if (ids.length < 2 || ids.length > MAX_TAGGED) {
        tags = new Map();
        settings = new Map();
        return;
      }
      const answer = await ask("/api/differences", { run: ids });
      if (asked !== taggedFor) return;
      tags = new Map(answer.runs.map(({ id, settings: own }) => [id, own.map(([key, value]) => key + "=" + value)]));
      settings = new Map(answer.runs.map(({ id, settings: own }) => [id, new Map(own)]));
      draw();
    };

    const groupLine = (experiment, found) => {
      const made = element("tr", "group");
      const cell = element("td");
      cell.colSpan = COLUMNS.length;
      const members = found.filter((row) => row.experiment === experiment);
      const states = ["running", "done", "stopped", "died", "broken"]
        .map((kind) => [kind, members.filter((row) => row.status.kind === kind).length])
        .filter(([, n]) => n);
      cell.append(
        "experiment ",
        element("b", "", experiment === "." ? "here" : experiment),
        " · " + states.map(([kind, n]) => n + " " + kind).join(", ") + " · ",
        anchor("compare its arms", "compare", { experiment }),
      );
      made.append(cell);
      return made;
    };

    // The groups by which the list can be cut: settings in which the runs differ, and the arm of an experiment.
    const groupOf = (row) =>
      state.group === "arm" ? (row.arm ?? "no arm") : (settings.get(row.id)?.get(state.group) ?? "not set");
    const offer = (found) => {
      const keys = new Set(
        found.flatMap((row) => [...(settings.get(row.id)?.keys() || [])]).filter((key) => key !== "seed"),
      );
      if (found.some((row) => row.arm)) keys.add("arm");
      if (state.group) keys.add(state.group);
      groups.replaceChildren(
        ...["", ...keys].map((key) => new Option(key ? "by " + key : "no groups", key, false, key === state.group)),
      );
    };
    const summaryLine = (value, members) => {
      const made = element("tr", "summary");
      const name = element("td", "name");
      name.colSpan = 3;
      name.append(state.group + " ", element("b", "", String(value)), " · " + members.length + " runs");
      made.append(name);
      COLUMNS.forEach(([title, , key, shown]) => {
        if (!key) return;
        const cell = element("td", "n");
        cell.dataset.title = title;
        cell.hidden = state.hide.has(title);
        const values = members.map((row) => row.last[key]).filter((known) => known !== undefined);
        if (values.length) cell.append(element("b", "", spread(values, shown)));
        made.append(cell);
      });
      made.append(element("td"));
      return made;
    };

    const draw = () => {
      const found = sorted(matching());
      const shown = found.slice(0, state.most);
      const lines = [];
      let group = null;
      offer(found);
      const values = state.group ? new Map() : null;
      if (values) {
        for (const row of shown) values.set(groupOf(row), [...(values.get(groupOf(row)) || []), row]);
        for (const [value, members] of [...values].sort(([a], [b]) =>
          String(a).localeCompare(String(b), "en", { numeric: true }),
        ))
          lines.push(
            summaryLine(value, members),
            ...members.map((row) => line(row, chosen, tags.get(row.id) || [], state.hide)),
          );
      }
      for (const row of values ? [] : shown) {
        const isGrouped = state.sort === 0 || state.sort === COLUMNS.length - 1;
        if (isGrouped && row.experiment !== undefined && row.experiment !== group)
          lines.push(groupLine(row.experiment, found));
        group = row.experiment;
        lines.push(line(row, chosen, tags.get(row.id) || [], state.hide));
      }
      body.replaceChildren(...lines);
      [...head.children].forEach((cell, idx) => {
        if (idx === state.sort) cell.setAttribute("aria-sort", state.isDown ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
        cell.hidden = state.hide.has(COLUMNS[idx][0]);
      });
      more.hidden = found.length <= state.most;
      const nRunning = [...rows.values()].filter((row) => row.status.kind === "running").length;
      counts.textContent = found.length + " of " + rows.size + " runs, " + nRunning + " running";
      if (rows.size === 0)
        body.append(
          Object.assign(element("tr"), { textContent: "no run in this folder yet; one that is started appears here" }),
        );
      choose();
      tag(found).catch(() => {});
    };
    const choose = () => {
      compare.textContent = chosen.size > 1 ? "compare " + chosen.size + " runs" : "";
      compare.href = stapo.app.link("compare", { run: [...chosen] });
      remember({ run: [...chosen] });
    };
    root.addEventListener("chosen", choose);
    find.addEventListener("input", () => {
      state.find = find.value;
      remember({ find: state.find });
      draw();
    });
    kinds.addEventListener("change", () => {
      state.kind = kinds.value;
      remember({ state: state.kind });
      draw();
    });
    draw();
    // Ages grow without news.
    const timer = setInterval(draw, 20000);
    return {
      update: (changed) => {
        const inPlace = [...changed].every(
          (id) => rows.has(id) && body.querySelector('tr[data-id="' + CSS.escape(id) + '"]'),
        );
        if (!inPlace || state.sort !== 0 || state.group) {
          draw();
          return;
        }
        for (const id of changed)
          body
            .querySelector('tr[data-id="' + CSS.escape(id) + '"]')
            .replaceWith(line(rows.get(id), chosen, tags.get(id) || [], state.hide));
      },
      leave: () => clearInterval(timer),
    };
  };
})();
