//! Which files of a repository make up the model that was asked for. Pure: names in, names out, so the same
//! choice is made from the server's listing and, offline, from what is stored.

use super::{HubError, Spec};

/// Files that belong to a safetensors model besides its weights, where a repository has them.
const COMPANIONS: [&str; 13] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "hf_quant_config.json",
    "adapter_config.json",
];

/// Endings of files that execute code when they are read as their writers meant.
const PICKLES: [&str; 6] = [".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"];

/// GGUF files that aren't language models: a multimodal projector, an importance matrix.
const NOT_MODELS: [&str; 2] = ["mmproj", "imatrix"];

/// Chooses among the `files` of a repository:
///
/// - a selector that is a file: that file, with the other parts if it is one of a split set;
/// - a selector that isn't: the one GGUF model with this quantisation in its name, split sets whole;
/// - no selector: the safetensors model at the root with its configuration and tokenizer, else the only GGUF
///   model.
///
/// Quantisations and files match whatever their case. Pickles are never chosen.
///
/// # Errors
/// [`HubError::NoMatch`], [`HubError::Ambiguous`], [`HubError::Incomplete`], [`HubError::NoWeights`].
pub(super) fn choose(spec: &Spec, files: &[String]) -> Result<Vec<String>, HubError> {
    let (present, missing) = parts(select(spec, files)?, files);
    match missing.is_empty() {
        true => Ok(present),
        false => Err(HubError::Incomplete { model: spec.repo.to_string(), missing }),
    }
}

/// What [`choose`] would choose, as far as it is there.
///
/// # Errors
/// Those of [`choose`] but [`HubError::Incomplete`].
pub(super) fn present(spec: &Spec, files: &[String]) -> Result<Vec<String>, HubError> {
    Ok(parts(select(spec, files)?, files).0)
}

fn select(spec: &Spec, files: &[String]) -> Result<Vec<String>, HubError> {
    match &spec.selector {
        Some(selector) => by_selector(spec, selector, files),
        None => by_default(spec, files),
    }
}

fn by_selector(spec: &Spec, selector: &str, files: &[String]) -> Result<Vec<String>, HubError> {
    if has_ending(selector, &PICKLES) {
        return Err(HubError::NoWeights { model: spec.repo.to_string(), pickles: true });
    }
    let named = files.iter().find(|f| *f == selector);
    if let Some(file) = named.or_else(|| files.iter().find(|f| f.eq_ignore_ascii_case(selector))) {
        return Ok(vec![file.clone()]);
    }
    let models = gguf_models(files);
    let matching: Vec<&String> = models.iter().copied().filter(|f| has_quant(f, selector)).collect();
    match matching.as_slice() {
        [one] => Ok(vec![(*one).clone()]),
        [] => Err(HubError::NoMatch {
            model: spec.repo.to_string(),
            selector: selector.to_owned(),
            available: match models.is_empty() {
                true => files.iter().filter(|f| !has_ending(f, &PICKLES)).cloned().collect(),
                false => models.into_iter().cloned().collect(),
            },
        }),
        several => Err(HubError::Ambiguous {
            model: format!("{}:{selector}", spec.repo),
            candidates: several.iter().map(|f| (*f).clone()).collect(),
        }),
    }
}

fn by_default(spec: &Spec, files: &[String]) -> Result<Vec<String>, HubError> {
    let at_root = |f: &&String| !f.contains('/');
    let weights: Vec<&String> =
        files.iter().filter(at_root).filter(|f| has_ending(f, &[".safetensors"])).collect();
    if !weights.is_empty() {
        // Some repositories carry the same weights a second time in their maker's own layout.
        let model = |f: &&String| f.starts_with("model");
        let any_model = weights.iter().any(|f| f.starts_with("model"));
        let index = |f: &&String| f.ends_with(".safetensors.index.json");
        let companion = |f: &&String| COMPANIONS.contains(&f.as_str());
        let mut chosen: Vec<String> =
            files.iter().filter(at_root).filter(|f| index(f) || companion(f)).cloned().collect();
        chosen.extend(weights.into_iter().filter(|f| !any_model || model(f)).cloned());
        return Ok(chosen);
    }
    match gguf_models(files).as_slice() {
        [one] => Ok(vec![(*one).clone()]),
        [] => Err(HubError::NoWeights {
            model: spec.repo.to_string(),
            pickles: files.iter().any(|f| has_ending(f, &PICKLES)),
        }),
        several => Err(HubError::Ambiguous {
            model: spec.repo.to_string(),
            candidates: several.iter().map(|f| (*f).clone()).collect(),
        }),
    }
}

/// The chosen files with the other parts of every split one: those that are there and those that aren't.
fn parts(chosen: Vec<String>, files: &[String]) -> (Vec<String>, Vec<String>) {
    let mut present: Vec<String> = Vec::new();
    let mut missing = Vec::new();
    for file in chosen {
        let parts = match Part::of(&file) {
            Some(part) => (1..=part.count).map(|i| part.name(i)).collect(),
            None => vec![file],
        };
        for part in parts {
            if !files.contains(&part) {
                missing.push(part);
            } else if !present.contains(&part) {
                present.push(part);
            }
        }
    }
    missing.sort();
    missing.dedup();
    (present, missing)
}

/// The language models among the GGUF files, split sets by their first present part.
fn gguf_models(files: &[String]) -> Vec<&String> {
    let mut sets: Vec<(String, &String)> = Vec::new();
    for file in files.iter().filter(|f| has_ending(f, &[".gguf"])) {
        let base = file.rsplit('/').next().unwrap_or(file).to_ascii_lowercase();
        if NOT_MODELS.iter().any(|n| base.contains(n)) {
            continue;
        }
        let set = stem(file);
        if !sets.iter().any(|(s, _)| *s == set) {
            sets.push((set, file));
        }
    }
    sets.into_iter().map(|(_, file)| file).collect()
}

/// Path without the ending and without the number of a part.
fn stem(file: &str) -> String {
    match Part::of(file) {
        Some(part) => part.stem.to_owned(),
        None => file.rsplit_once('.').map_or(file, |(stem, _)| stem).to_owned(),
    }
}

/// Whether `quant` stands in the name between separators. `_` isn't one: Q4_K isn't Q4_K_M.
fn has_quant(file: &str, quant: &str) -> bool {
    let (stem, quant) = (stem(file).to_ascii_lowercase(), quant.to_ascii_lowercase());
    let edge = |c: Option<char>| c.is_none_or(|c| "-./".contains(c));
    stem.match_indices(&quant).any(|(at, found)| {
        edge(stem[..at].chars().next_back()) && edge(stem[at + found.len()..].chars().next())
    })
}

/// `stem-00002-of-00005.gguf`
struct Part<'a> {
    stem: &'a str,
    count: u32,
    digits: usize,
    ending: &'a str,
}

impl<'a> Part<'a> {
    /// More parts than any model has; a name that claims more isn't taken for a part.
    const MOST: u32 = 10_000;

    fn of(file: &'a str) -> Option<Self> {
        let (name, ending) = file.rsplit_once('.')?;
        let (rest, count) = name.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |s: &str| s.len() == count.len() && s.bytes().all(|b| b.is_ascii_digit());
        let (n, of) = match digits(number) && digits(count) {
            true => (number.parse::<u32>().ok()?, count.parse::<u32>().ok()?),
            false => return None,
        };
        (1 <= n && n <= of && of <= Self::MOST).then_some(Self {
            stem,
            count: of,
            digits: count.len(),
            ending,
        })
    }

    fn name(&self, number: u32) -> String {
        let Self { stem, count, digits, ending } = self;
        format!("{stem}-{number:0digits$}-of-{count:0digits$}.{ending}", digits = *digits)
    }
}

fn has_ending(file: &str, endings: &[&str]) -> bool {
    let file = file.to_ascii_lowercase();
    endings.iter().any(|e| file.ends_with(e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pick(spec: &str, files: &[&str]) -> Result<Vec<String>, String> {
        let files: Vec<String> = files.iter().map(|f| f.to_string()).collect();
        choose(&Spec::parse(spec).unwrap(), &files).map_err(|e| e.to_string())
    }

    const GGUF: [&str; 11] = [
        ".gitattributes",
        "README.md",
        "m-Q4_K_M.gguf",
        "m-UD-Q4_K_XL.gguf",
        "m-q8_0.gguf",
        "BF16/m-BF16-00002-of-00003.gguf",
        "BF16/m-BF16-00001-of-00003.gguf",
        "BF16/m-BF16-00003-of-00003.gguf",
        "m-Q6_K-00001-of-00002.gguf",
        "mmproj-F16.gguf",
        "mmproj-BF16.gguf",
    ];

    #[test]
    fn a_quantisation_picks_its_gguf_whatever_the_case() {
        assert_eq!(pick("o/n:q4_k_m", &GGUF).unwrap(), ["m-Q4_K_M.gguf"]);
        assert_eq!(pick("o/n:Q8_0", &GGUF).unwrap(), ["m-q8_0.gguf"]);
        assert_eq!(pick("o/n:Q4_K_XL", &GGUF).unwrap(), ["m-UD-Q4_K_XL.gguf"]);
        assert_eq!(pick("o/n:UD-Q4_K_XL", &GGUF).unwrap(), ["m-UD-Q4_K_XL.gguf"]);
        assert_eq!(pick("o/n:MMPROJ-f16.gguf", &GGUF).unwrap(), ["mmproj-F16.gguf"], "named, so wanted");
        let message = pick("o/n:Q4_K", &GGUF).unwrap_err();
        assert!(message.contains("\"Q4_K\"") && message.contains("m-q8_0.gguf"), "{message}");
        let message = pick("o/n:Q4_0", &["a-Q4_0.gguf", "a-qat-Q4_0.gguf"]).unwrap_err();
        assert!(message.contains("several") && message.contains("a-qat-Q4_0.gguf"), "{message}");
    }

    #[test]
    fn split_sets_are_taken_whole_in_order_or_refused() {
        let whole: Vec<String> = (1..=3).map(|i| format!("BF16/m-BF16-0000{i}-of-00003.gguf")).collect();
        assert_eq!(pick("o/n:bf16", &GGUF).unwrap(), whole);
        assert_eq!(pick("o/n:BF16/m-BF16-00002-of-00003.gguf", &GGUF).unwrap(), whole);
        let message = pick("o/n:Q6_K", &GGUF).unwrap_err();
        assert!(message.contains("missing: m-Q6_K-00002-of-00002.gguf"), "{message}");
        // Not numbers of parts.
        for name in ["m-0-of-3.gguf", "m-4-of-3.gguf", "m-1-of-99999999999.gguf", "m-01-of-3.gguf"] {
            assert_eq!(pick("o/n", &[name]).unwrap(), [name]);
        }
    }

    #[test]
    fn without_a_selector_a_lone_gguf_is_enough() {
        assert_eq!(pick("o/n", &["README.md", "m-Q4_0.gguf", "mmproj.gguf"]).unwrap(), ["m-Q4_0.gguf"]);
        let message = pick("o/n", &GGUF).unwrap_err();
        assert!(message.contains("name one") && !message.contains("mmproj"), "{message}");
        assert_eq!(message.matches("BF16/").count(), 1, "a split set is one candidate: {message}");
    }

    #[test]
    fn a_safetensors_model_comes_with_its_companions_and_without_pickles() {
        let files = [
            "README.md",
            "config.json",
            "chat_template.jinja",
            "generation_config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "consolidated.safetensors",
            "pytorch_model.bin",
            "tokenizer.json",
            "onnx/model.onnx",
            "original/model.safetensors",
            "m-Q4_0.gguf",
        ];
        let expected = [
            "config.json",
            "chat_template.jinja",
            "generation_config.json",
            "model.safetensors.index.json",
            "tokenizer.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ];
        let mut got = pick("o/n", &files).unwrap();
        let mut want: Vec<String> = expected.iter().map(|f| f.to_string()).collect();
        got.sort();
        want.sort();
        assert_eq!(got, want);
        let short: Vec<&str> = files.iter().copied().filter(|f| !f.contains("00002-of")).collect();
        let message = pick("o/n", &short).unwrap_err();
        assert!(message.contains("model-00002-of-00002.safetensors"), "{message}");
        assert_eq!(pick("o/n:Q4_0", &files).unwrap(), ["m-Q4_0.gguf"]);
        let adapter = ["adapter_config.json", "adapter_model.safetensors"];
        assert_eq!(pick("o/n", &adapter).unwrap(), adapter);
    }

    #[test]
    fn pickles_are_refused_and_explained() {
        for spec in ["o/n", "o/n:pytorch_model.bin", "o/n:PYTORCH_MODEL.BIN"] {
            let message = pick(spec, &["config.json", "pytorch_model.bin"]).unwrap_err();
            assert!(message.contains("pickle") && message.contains("convert"), "{message}");
        }
        let message = pick("o/n", &["README.md"]).unwrap_err();
        assert!(message.contains("neither") && !message.contains("pickle"), "{message}");
    }
}
