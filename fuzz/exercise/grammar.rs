//! What a server does with a format from a request, on any bytes: compile it in bounded time, and follow an answer.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use lapidary_text::{CallGrammar, Grammar, GrammarCompiler, Tokenizer};
use serde_json::Value;

fn compiler() -> &'static (Arc<Tokenizer>, GrammarCompiler) {
    static COMPILER: OnceLock<(Arc<Tokenizer>, GrammarCompiler)> = OnceLock::new();
    COMPILER.get_or_init(|| {
        let file = include_bytes!("../../tests/pebble/moe/tokenizer.json");
        let tokenizer = Arc::new(Tokenizer::from_json(file).expect("the pebble tokenizer loads"));
        let compiler = GrammarCompiler::new(Arc::clone(&tokenizer));
        compiler.compile(&Grammar::JsonObject).expect("any object is a format");
        (tokenizer, compiler)
    })
}

/// The first byte chooses the kind of format and what is answered, the rest is its source. Panics if a promise is broken:
/// time, a mask that allows nothing, an allowed token that is not taken.
pub fn grammar(bytes: &[u8]) {
    let Some((&first, source)) = bytes.split_first() else { return };
    let Ok(source) = std::str::from_utf8(source) else { return };
    let (tokenizer, compiler) = compiler();
    let json = || serde_json::from_str::<Value>(source);
    let grammar = match first % 4 {
        0 => match json() {
            Ok(schema) => Grammar::JsonSchema(schema),
            Err(_) => return,
        },
        1 => Grammar::Regex(source.to_owned()),
        2 => Grammar::Lark(source.to_owned()),
        _ => match json() {
            Ok(Value::Array(tools)) => Grammar::Calls(CallGrammar { tools, several: first & 4 == 0 }),
            _ => return,
        },
    };
    let start = Instant::now();
    let compiled = compiler.compile(&grammar);
    let took = start.elapsed();
    assert!(took < Duration::from_secs(3), "{took:?} for {grammar:?}");
    let mut matcher = match compiled {
        Ok(matcher) => matcher,
        Err(error) => {
            assert!(error.to_string().len() < 1500, "{error}");
            return;
        }
    };
    let mut random = u64::from(first) << 8 | 1;
    let mut words = Vec::new();
    for _ in 0..24 {
        if matcher.is_complete() {
            return;
        }
        // A grammar may be too complex at some place; that ends the request.
        if matcher.mask(&mut words).is_err() {
            return;
        }
        let allows = |id: &u32| words[*id as usize / 32] >> (id % 32) & 1 == 1;
        let allowed: Vec<u32> = (0..tokenizer.vocab_size()).filter(allows).collect();
        assert!(!allowed.is_empty(), "{grammar:?}");
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let id = allowed[(random % allowed.len() as u64) as usize];
        if tokenizer.specials().end_ids().any(|end| end == id) {
            return;
        }
        if let Err(error) = matcher.accept(id) {
            assert!(
                error.to_string().contains("complex") || error.to_string().contains("limit"),
                "{error} for {grammar:?}"
            );
            return;
        }
    }
}
