//! What tests of several modules share.

use std::path::{Path, PathBuf};

/// A chat template in the characters of the built-in model: `(system)question=answer<|end|>`. With the variable `shout`
/// each question has another sign.
pub const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'system' %}({{ m.content }}){% elif m.role == 'user' %}\
     {{ m.content }}{{ '+=' if shout else '=' }}{% else %}{{ m.content }}<|end|>:{% endif %}{% endfor %}\
     {% if add_generation_prompt %}so {% endif %}";

/// A copy of the built-in model in `folder`, with a chat template.
pub fn chat_model(folder: &Path, template: &str) -> PathBuf {
    let model = folder.join("model");
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/base");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(base).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    std::fs::write(model.join("chat_template.jinja"), template).unwrap();
    model
}
