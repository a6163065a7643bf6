//! Makes the files in `models/` from the pebbles as trained (bf16 safetensors with `config.json`,
//! `generation_config.json` and `tokenizer.json`):
//!
//! ```text
//! cargo run --release --example make_pebbles -- FOLDER models/pebble-moe-q8_0.gguf
//! ```
//!
//! The file has the project's own chat template. Both pebbles were trained on prompts that end in an empty thought when
//! thinking is off, so both get that form of it, although published models of `e`'s kind have the other.

use std::path::Path;

use lapidary::convert::{ConvertOptions, chat_template, to_gguf};
use lapidary_formats::Format;
use lapidary_text::Builtin;
use lapidary_weights::Checkpoint;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, out] = arguments.as_slice() else {
        return Err("usage: make_pebbles FOLDER OUT.gguf".into());
    };
    let (folder, out) = (Path::new(folder), Path::new(out));
    let checkpoint = Checkpoint::open(folder)?;
    let name = folder.file_name().map(|name| format!("Pebble {}", name.to_string_lossy()));
    let options = ConvertOptions {
        name,
        chat_template: Some(chat_template(Builtin::Gemma4)),
        ..ConvertOptions::new(Format::Q8_0)
    };
    let report = to_gguf(&checkpoint, out, &options)?;
    println!("{}: {} bytes, {} tensors", out.display(), report.bytes, report.tensors);
    for fallback in &report.fallbacks {
        println!("{} (rows of {}) is {}", fallback.tensor, fallback.cols, fallback.format);
    }
    for name in &report.dropped {
        println!("left out: {name}");
    }
    for note in &report.notes {
        println!("note: {note}");
    }
    Ok(())
}
