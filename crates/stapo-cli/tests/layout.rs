//! The layout of every page of `stapo serve` in a browser, wide and as on a telephone, in both themes: nothing lies beyond
//! the page, and no text lies on another.

use crate::browser::runs::{STAPO, train};
use crate::browser::session::Session;
use crate::common::{ok, stapo};
use crate::pages::experiment;
use crate::serve::Server;
use serde_json::json;

/// What lies beyond the page, and texts and controls that lie on each other. What a box cuts off or scrolls is left out.
const LAYOUT: &str = r#"(() => {
  const found = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width + 1) found.push("the page is wider than the window");
  const cuts = (one) => ["auto", "scroll", "hidden"].includes(getComputedStyle(one).overflowX);
  if (width >= 1440)
    for (const box of document.querySelectorAll(".scroll"))
      if (box.checkVisibility() && box.scrollWidth > box.clientWidth + 1) found.push("a table is cut: " + box.innerText.slice(0, 60));
  const visible = (node, rect, isControl) => {
    let [left, top, right, bottom] = [rect.left, rect.top, rect.right, rect.bottom];
    for (let above = node; above && above !== document.body; above = above.parentElement) {
      const style = getComputedStyle(above);
      if (style.opacity === "0" || style.visibility === "hidden") return null;
      if (cuts(above) && !(above === node && isControl)) {
        const box = above.getBoundingClientRect();
        [left, top] = [Math.max(left, box.left), Math.max(top, box.top)];
        [right, bottom] = [Math.min(right, box.right), Math.min(bottom, box.bottom)];
      }
    }
    return right - left > 2 && bottom - top > 2 ? { left, top, right, bottom } : null;
  };
  const boxes = [];
  for (const one of document.querySelectorAll("body *")) {
    if (one.closest("script, template, datalist, option, [hidden]") || !one.checkVisibility()) continue;
    const isControl = one.matches("input, select, button");
    const rects = [];
    if (isControl) rects.push(one.getBoundingClientRect());
    else
      for (const child of one.childNodes)
        if (child.nodeType === Node.TEXT_NODE && child.data.trim() && !one.closest("select, button")) {
          const range = document.createRange();
          range.selectNodeContents(child);
          rects.push(...range.getClientRects());
        }
    for (const rect of rects) {
      const box = visible(one, rect, isControl);
      if (!box) continue;
      const name = one.tagName.toLowerCase() + "." + (one.getAttribute("class") || "") + " " + (one.textContent || one.placeholder || "").trim().slice(0, 40);
      if (box.right > width + 1 || box.left < -1) found.push("beyond the page: " + name);
      boxes.push({ ...box, one, name });
    }
  }
  boxes.sort((a, b) => a.top - b.top);
  boxes.forEach((a, idx) => {
    for (const b of boxes.slice(idx + 1)) {
      if (b.top > a.bottom - 3) break;
      const isApart = a.one === b.one || a.one.contains(b.one) || b.one.contains(a.one);
      const [x, y] = [Math.min(a.right, b.right) - Math.max(a.left, b.left), Math.min(a.bottom, b.bottom) - b.top];
      if (!isApart && x > 3 && y > 3) found.push(a.name + " lies on " + b.name);
    }
  });
  return found.slice(0, 8);
})()"#;

#[test]
fn nothing_lies_beyond_the_page_or_on_something_else() {
    let Some(mut session) = Session::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::create_dir(at.join("runs")).unwrap();
    let runs = at.join("runs");
    train(&runs, "a-run-with-a-name-that-is-longer-than-most-names-of-runs-are", STAPO, 1);
    train(&runs, "b", "{preset=\"grpo\"}", 2);
    experiment(&runs);
    ok(&stapo(at, &["eval", "--model", "runs/b", "--limit", "4", "--samples", "2", "--max-tokens", "40"]));
    ok(&stapo(at, &["runs", "tag", "runs/b", "baseline", "to look at"]));
    ok(&stapo(at, &["runs", "note", "runs/b", "the learning rate of this one is that of the paper"]));
    let server = Server::start(&runs, &[]);
    let listed = server.json("/api/runs");
    let evaluated = listed["rows"].as_array().unwrap().iter().find(|row| row["id"] == "b").unwrap();
    assert_eq!((&evaluated["is_evaluated"], &evaluated["tags"][0]), (&json!(true), &json!("baseline")));
    assert!(evaluated["sparks"]["eval_accuracy"].as_array().unwrap().len() >= 3, "{evaluated}");
    let views = [
        ("#/runs", "table.list tbody tr"),
        ("#/runs?group=objective.aggregate.kind", "tr.summary"),
        ("#/run?run=b", ".curve"),
        ("#/samples?run=b", "table.samples td"),
        ("#/samples?run=b&verdict=right&tokens_to=40", "table.samples th"),
        ("#/responses?run=b", ".group article"),
        ("#/tokens?run=b", "#view article"),
        ("#/evaluations?run=b", "#view table td"),
        ("#/compare?experiment=exp", "#view section table td"),
    ];
    let mut problems = Vec::new();
    for (width, theme) in [(1440, "light"), (390, "dark")] {
        session.resize(width, 900);
        session.theme(theme);
        for (hash, ready) in views {
            session.open("about:blank");
            session.open(&server.page(hash));
            session.until(&format!("document.querySelector('{ready}')"));
            // What a view asks for after its first drawing, such as the differing settings of the list.
            std::thread::sleep(std::time::Duration::from_millis(300));
            let found = session.value(LAYOUT);
            problems.extend(
                found.as_array().unwrap().iter().map(|text| format!("{hash} at {width}, {theme}: {text}")),
            );
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
}
