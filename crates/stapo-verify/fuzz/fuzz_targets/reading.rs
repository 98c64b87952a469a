//! The reading of any text.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    stapo_verify::reading(text);
});
