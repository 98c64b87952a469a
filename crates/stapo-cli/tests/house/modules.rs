//! The modules of a crate and the imports between them.

use super::source::code_only;
use std::collections::{BTreeMap, BTreeSet};

/// A module by its path from the crate's root: `["shared", "chart"]`.
type Module = Vec<String>;

/// Which modules a crate has and which of them each module imports by a path from `crate`, `super` or `self`.
pub struct Imports(BTreeMap<Module, BTreeSet<Module>>);

impl Imports {
    /// `files` holds each source file's path below `src/` and its text. Test modules are left out: a test may look at
    /// everything.
    pub fn of(files: &[(String, String)]) -> Self {
        let modules = files.iter().map(|(path, text)| (module_of(path), text));
        let modules: BTreeMap<Module, &String> =
            modules.filter(|(module, _)| !module.iter().any(|part| part.contains("test"))).collect();
        let known: BTreeSet<Module> = modules.keys().cloned().collect();
        let edges = modules.iter().map(|(module, text)| {
            let named = paths(&without_inline_tests(&code_only(text)));
            let targets = named.iter().filter_map(|path| resolve(module, path, &known));
            // The root only lists the others.
            (module.clone(), targets.filter(|target| target != module && !target.is_empty()).collect())
        });
        Imports(edges.collect())
    }

    /// Groups of modules that import each other, directly or through others.
    pub fn circles(&self) -> Vec<String> {
        let reached: BTreeMap<&Module, BTreeSet<&Module>> =
            self.0.keys().map(|module| (module, self.reachable(module))).collect();
        let mut circles = BTreeSet::new();
        for (module, targets) in &reached {
            let own: Vec<String> = targets
                .iter()
                .filter(|target| reached[**target].contains(*module))
                .map(|target| target.join("::"))
                .collect();
            if own.len() > 1 {
                circles.insert(own.join(", "));
            }
        }
        circles.into_iter().collect()
    }

    pub fn n_imports(&self) -> usize {
        self.0.values().map(BTreeSet::len).sum()
    }

    fn reachable<'a>(&'a self, from: &'a Module) -> BTreeSet<&'a Module> {
        let mut seen = BTreeSet::new();
        let mut open = vec![from];
        while let Some(module) = open.pop() {
            for target in self.0.get(module).into_iter().flatten() {
                if seen.insert(target) {
                    open.push(target);
                }
            }
        }
        seen
    }
}

fn module_of(path: &str) -> Module {
    let mut parts: Module = path.trim_end_matches(".rs").split('/').map(String::from).collect();
    if parts.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        parts.pop();
    }
    parts
}

/// The code before the first `#[cfg(test)]` that opens a module in place.
fn without_inline_tests(code: &str) -> String {
    let inline = code.match_indices("#[cfg(test)]").map(|(at, _)| at).find(|at| {
        let after = &code[*at..];
        after.find('{') < after.find(';') || !after.contains(';')
    });
    code[..inline.unwrap_or(code.len())].to_string()
}

/// Every path that begins with `crate`, `super` or `self`, use trees written out.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start) {
            let is_start = !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
            if is_start {
                expand(&mut Vec::new(), &code[at..], &mut found);
            }
        }
    }
    found
}

/// Adds the paths that the use tree at the start of `text` stands for, and returns the bytes that it takes.
fn expand(before: &mut Vec<String>, text: &str, found: &mut Vec<Vec<String>>) -> usize {
    let n_before = before.len();
    let mut at = 0;
    loop {
        let word = text[at..].split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("");
        if !word.is_empty() {
            before.push(word.to_string());
            at += word.len();
            if text[at..].starts_with("::") {
                at += 2;
                continue;
            }
        } else if text[at..].starts_with('{') {
            at += 1;
            while at < text.len() && !text[at..].starts_with('}') {
                let n = expand(before, &text[at..], found);
                // Skips commas, blanks and the star of a glob: the path before the star is recorded anyway.
                at += if n == 0 { text[at..].chars().next().map_or(1, char::len_utf8) } else { n };
            }
            at += 1;
        }
        break;
    }
    if before.len() > n_before {
        found.push(before.clone());
    }
    before.truncate(n_before);
    at
}

/// The module that a path seen in `module` leads to: as much of the path as names modules.
fn resolve(module: &Module, path: &[String], known: &BTreeSet<Module>) -> Option<Module> {
    let n_up = path.iter().take_while(|part| *part == "super").count();
    let mut target: Module = match path.first()?.as_str() {
        "crate" => Vec::new(),
        _ => module[..module.len().checked_sub(n_up)?].to_vec(),
    };
    target.extend(path.iter().filter(|part| !["crate", "super", "self"].contains(&part.as_str())).cloned());
    while !known.contains(&target) {
        target.pop()?;
    }
    Some(target)
}
