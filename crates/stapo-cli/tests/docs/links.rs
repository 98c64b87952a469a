//! Relative links and anchors of Markdown pages.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The lines of a page outside fenced blocks, without what stands in backticks.
fn prose(page: &str) -> String {
    let mut out = String::new();
    let mut is_fenced = false;
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            is_fenced = !is_fenced;
        } else if !is_fenced {
            out.extend(line.split('`').step_by(2));
            out.push('\n');
        }
    }
    out
}

/// Where the links and pictures of a page lead.
fn targets(page: &str) -> Vec<String> {
    let prose = prose(page);
    let mut found = Vec::new();
    for (start, end) in [("](", ')'), ("src=\"", '"'), ("srcset=\"", '"'), ("href=\"", '"')] {
        let behind = prose.split(start).skip(1);
        found.extend(behind.filter_map(|rest| Some(rest.split_once(end)?.0.trim().to_string())));
    }
    found
}

/// The anchors of a page's headings, by the rule of GitHub and mdBook.
fn anchors(page: &str) -> Vec<String> {
    let mut n_seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut is_fenced = false;
    let mut found = Vec::new();
    for line in page.lines() {
        is_fenced ^= line.trim_start().starts_with("```");
        let Some(heading) = line.strip_prefix('#').filter(|_| !is_fenced) else { continue };
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let is_kept = |c: &char| c.is_alphanumeric() || matches!(c, '-' | '_' | ' ');
        let anchor: String = heading.chars().filter(is_kept).collect::<String>().replace(' ', "-");
        let n = n_seen.entry(anchor.clone()).or_default();
        found.push(if *n == 0 { anchor } else { format!("{anchor}-{n}") });
        *n += 1;
    }
    found
}

/// The links of a page that lead nowhere.
pub fn broken(path: &Path) -> Vec<String> {
    let page = std::fs::read_to_string(path).unwrap();
    let is_outside = |target: &str| target.contains("://") || target.starts_with("mailto:");
    let problem = |target: &String| -> Option<String> {
        if target.is_empty() || is_outside(target) {
            return None;
        }
        let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
        let file: PathBuf =
            if file.is_empty() { path.to_path_buf() } else { path.parent().unwrap().join(file) };
        if !file.exists() {
            return Some(format!("{}: {target}: no such file", path.display()));
        }
        let is_page = file.extension().is_some_and(|extension| extension == "md");
        let is_there = anchor.is_empty()
            || !is_page
            || anchors(&std::fs::read_to_string(&file).unwrap()).iter().any(|known| known == anchor);
        (!is_there).then(|| format!("{}: {target}: no such heading", path.display()))
    };
    targets(&page).iter().filter_map(problem).collect()
}

#[test]
fn links_and_anchors_are_found() {
    let page =
        "# A `b`: c_d\n[x](a.md#e) `[y](z)`\n```sh\n# no\n[n](m)\n```\n## A b: c_d\n<img src=\"p.svg\">\n";
    assert_eq!(targets(page), ["a.md#e", "p.svg"]);
    assert_eq!(anchors(page), ["a-b-c_d", "a-b-c_d-1"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("page.md");
    std::fs::write(&path, "# One\n[a](#one) [b](#two) [c](page.md#one) [d](none.md) [e](https://x.y/z)\n")
        .unwrap();
    let found = broken(&path);
    assert!(found.len() == 2 && found[0].contains("#two") && found[1].contains("none.md"), "{found:?}");
}
