//! `quantization_config`: read to refuse in plain words a scheme that the tensors would refuse obscurely.
//!
//! Which modules are quantised, and how, is taken from the tensors: `targets`, `ignore` and `exclude_modules` are
//! patterns over module names, and published files have been found to contradict them.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::{Error, Result};

#[derive(Deserialize)]
struct Scheme {
    quant_method: Option<String>,
    #[serde(default)]
    config_groups: serde_json::Map<String, Value>,
}

#[derive(Deserialize)]
struct Group {
    format: Option<String>,
    weights: Option<Weights>,
}

#[derive(Deserialize)]
struct Weights {
    num_bits: Option<u64>,
    #[serde(rename = "type")]
    kind: Option<String>,
    strategy: Option<String>,
    group_size: Option<i64>,
    block_structure: Option<Vec<u64>>,
    symmetric: Option<bool>,
}

/// Looks at the `quantization_config` of a `config.json`, wherever it stands.
///
/// # Errors
/// [`Error::NotSupported`] for a method or a number format that is not read; [`Error::BadConfig`] for a field of the
/// wrong type.
pub(crate) fn check_scheme(config: &Value, path: &Path) -> Result<()> {
    let found = ["/quantization_config", "/text_config/quantization_config"];
    let Some(value) = found.iter().find_map(|p| config.pointer(p)).filter(|v| !v.is_null()) else {
        return Ok(());
    };
    let bad = |e: serde_json::Error| Error::BadConfig {
        path: path.to_owned(),
        what: format!("quantization_config: {e}"),
    };
    let refuse = |what: String| {
        Error::NotSupported {
        path: path.to_owned(),
        what,
        remedy: "use a checkpoint in BF16, FP8 (tensor, channel or 128 x 128 blocks), NVFP4, INT4 in groups of 32, \
                 or a GGUF file"
            .to_owned(),
    }
    };
    let scheme = Scheme::deserialize(value).map_err(bad)?;
    if let Some(method) = &scheme.quant_method
        && !["compressed-tensors", "modelopt", "modelopt_fp4"].contains(&method.as_str())
    {
        return Err(refuse(format!("quantisation method {method:?} is")));
    }
    for (name, group) in &scheme.config_groups {
        let group = Group::deserialize(group).map_err(bad)?;
        let Some(weights) = &group.weights else { continue };
        if let Some(what) = weights.unsupported() {
            let format = group.format.as_deref().unwrap_or("no format");
            return Err(refuse(format!("{what} ({name} of quantization_config, {format}) is")));
        }
    }
    Ok(())
}

impl Weights {
    /// What about these weights is not read, if anything. Fields that are absent decide nothing.
    fn unsupported(&self) -> Option<String> {
        if self.symmetric == Some(false) {
            return Some("asymmetric quantisation".to_owned());
        }
        let kind = self.kind.as_deref().unwrap_or("int");
        let group =
            self.group_size.filter(|_| matches!(self.strategy.as_deref(), Some("group" | "tensor_group")));
        match (kind, self.num_bits?) {
            ("float", 8) => match &self.block_structure {
                Some(block) if self.strategy.as_deref() == Some("block") && block[..] != [128, 128] => {
                    Some(format!("FP8 in blocks of {block:?}"))
                }
                _ => group.map(|g| format!("FP8 in groups of {g}")),
            },
            ("float", 4) => group.filter(|&g| g != 16).map(|g| format!("FP4 in groups of {g}")),
            ("int", 4) => match (self.strategy.as_deref(), group) {
                (Some("group"), Some(32)) | (None, _) | (Some("group"), None) => None,
                (Some("group"), Some(g)) => Some(format!("INT4 in groups of {g}")),
                (Some(strategy), _) => Some(format!("INT4 with one scale a {strategy}")),
            },
            (kind, bits) => Some(format!("{bits}-bit {kind} weights")),
        }
    }
}
