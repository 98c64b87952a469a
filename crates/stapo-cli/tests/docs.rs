//! README and docs: their commands run, their links lead somewhere, and the book names every page.
//!
//! A block fenced as `sh` is run by bash, all blocks of a page in order in one folder. The folder of a tutorial
//! (`docs/tutorials`) starts empty, that of another page with `examples/` and `configs/`. Runs are shortened: `train`,
//! `experiment`, `sft`, `prefer`, `rm` and `pretrain` get a few steps where a reader has many. Blocks fenced otherwise (`sh gpu`, `sh
//! network`) and indented commands are only parsed, by the unit test `every_documented_command_parses`.

mod links;

use crate::common::{copy_folder, root};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The blocks of a page that are fenced as `sh`, as one script.
fn script(page: &str) -> String {
    let mut script = String::new();
    let mut inside = false;
    for line in page.lines() {
        if line.starts_with("```") {
            inside = !inside && line == "```sh";
        } else if inside {
            script.push_str(line);
            script.push('\n');
        }
    }
    script
}

/// Puts a program `stapo` into `folder` that trains a few steps where a reader would train many.
fn install(folder: &Path) {
    let text = format!(
        "#!/usr/bin/env bash\n\
         short=\n\
         small='--set rollout.problems_per_step=4 --set rollout.group_size=4 --set update.problems_per_minibatch=2 \
         --set evaluation.problems=4'\n\
         case \"$1 $*\" in\n\
         train*--resume*) short='--set steps=3' ;;\n\
         train*) short=\"--set steps=2 $small\" ;;\n\
         experiment*--out*) short=\"--set steps=1 $small\" ;;\n\
         plan*--gpus*) short='--set rollout.problems_per_step=64' ;;\n\
         sft*|prefer*|rm*|pretrain*) short='--set steps=3' ;;\n\
         esac\n\
         exec {:?} \"$@\" $short\n",
        env!("CARGO_BIN_EXE_stapo")
    );
    let program = folder.join("stapo");
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Markdown files of a folder and of all folders in it.
fn pages_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            found.extend(pages_below(&path));
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    found.sort();
    found
}

#[test]
fn commands_in_fenced_blocks_run() {
    let bin = tempfile::tempdir().unwrap();
    install(bin.path());
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap_or_default());
    let mut n_pages = 0;
    for page in pages_below(&root().join("docs")).into_iter().chain([root().join("README.md")]) {
        let script = script(&std::fs::read_to_string(&page).unwrap());
        if script.is_empty() {
            continue;
        }
        n_pages += 1;
        let folder = tempfile::tempdir().unwrap();
        if !page.starts_with(root().join("docs/tutorials")) {
            copy_folder(&root().join("examples"), &folder.path().join("examples"));
            copy_folder(&root().join("configs"), &folder.path().join("configs"));
        }
        let output = Command::new("bash")
            .args(["-euo", "pipefail", "-c", &script])
            .current_dir(folder.path())
            .env("PATH", &path)
            .env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}:\n{script}\n{text}", page.display());
    }
    assert!(n_pages > 0, "no page has a block fenced as sh");
}

#[test]
fn every_link_leads_somewhere() {
    let names = ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md", "RELEASE.md", "STYLE.md"];
    let pages = names.map(|name| root().join(name)).into_iter().filter(|page| page.exists());
    let broken: Vec<String> =
        pages.chain(pages_below(&root().join("docs"))).flat_map(|page| links::broken(&page)).collect();
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

/// `SUMMARY.md` is the table of contents of the book that mdBook makes of `docs/`.
#[test]
fn the_book_names_every_page_once() {
    let docs = root().join("docs");
    let summary = std::fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    for page in pages_below(&docs) {
        let name = page.strip_prefix(&docs).unwrap().display().to_string();
        let n = summary.matches(&format!("]({name})")).count();
        assert_eq!(n, usize::from(name != "SUMMARY.md"), "docs/SUMMARY.md must name {name} once");
    }
}
