//! The commands of README and docs, run as a reader would.
//!
//! A block fenced as `sh` is run by bash, all blocks of a page in order in one folder that starts with `examples/` and
//! `configs/` and nothing else. Blocks fenced otherwise (`sh gpu`, `sh network`) and indented commands are only parsed,
//! by the unit test `every_documented_command_parses`.

use crate::common::{copy_folder, root};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
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
         case \"$1 $*\" in\n\
         train*--resume*) ;;\n\
         train*) short='--set steps=2 --set rollout.problems_per_step=4 --set update.problems_per_minibatch=2 \
         --set evaluation.problems=4' ;;\n\
         sft*|prefer*|rm*|pretrain*) short='--set steps=3' ;;\n\
         esac\n\
         exec {:?} \"$@\" $short\n",
        env!("CARGO_BIN_EXE_stapo")
    );
    let program = folder.join("stapo");
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn commands_in_fenced_blocks_run() {
    let bin = tempfile::tempdir().unwrap();
    install(bin.path());
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap_or_default());
    let mut n_pages = 0;
    let pages = std::fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    for page in
        pages.chain([root().join("README.md")]).filter(|page| page.extension().is_some_and(|e| e == "md"))
    {
        let script = script(&std::fs::read_to_string(&page).unwrap());
        if script.is_empty() {
            continue;
        }
        n_pages += 1;
        let folder = tempfile::tempdir().unwrap();
        copy_folder(&root().join("examples"), &folder.path().join("examples"));
        copy_folder(&root().join("configs"), &folder.path().join("configs"));
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
