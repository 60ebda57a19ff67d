//! Canonical form: converts names, keys and tensor layouts of old converters, in memory, to those
//! of llama.cpp's current converter, the only ones that architectures read. Tensors that need
//! conversion are converted when a backend first reads them.

mod ollama;

use std::collections::BTreeMap;
use std::path::Path;

use bodkin_gguf::{File, Format, Tensor};

use crate::error::{Error, Result};

/// Opens a model's file in canonical form.
pub fn open(path: impl AsRef<Path>) -> Result<File> {
    canonical(File::open(path)?)
}

/// Converts a file to canonical form.
pub fn canonical(mut file: File) -> Result<File> {
    ollama::convert(&mut file)?;
    stack_experts(&mut file)?;
    Ok(file)
}

/// The tensors of one expert in old files.
const EXPERT_TENSORS: [&str; 3] = ["ffn_gate", "ffn_up", "ffn_down"];

/// The name of the stacked tensor and the expert's number, for `blk.3.ffn_up.7.weight`.
fn expert_of(name: &str) -> Option<(String, usize)> {
    let mut words = name.split('.');
    let (block, layer) = (words.next()?, words.next()?);
    let (part, expert) = (words.next()?, words.next()?.parse().ok()?);
    let is_expert = block == "blk" && EXPERT_TENSORS.contains(&part) && words.eq(["weight"]);
    is_expert.then(|| (format!("blk.{layer}.{part}_exps.weight"), expert))
}

/// Stacks the tensors of experts in old files, which have one tensor for each expert.
fn stack_experts(file: &mut File) -> Result<()> {
    let mut stacks: BTreeMap<String, BTreeMap<usize, Tensor>> = BTreeMap::new();
    for tensor in file.tensors() {
        if let Some((stack, expert)) = expert_of(&tensor.name)
            && stacks.entry(stack).or_default().insert(expert, tensor.clone()).is_some()
        {
            return Err(Error::Unsupported(format!(
                "a second tensor of the expert of {}",
                tensor.name
            )));
        }
    }
    if stacks.is_empty() {
        return Ok(());
    }
    file.retain_tensors(|tensor| expert_of(&tensor.name).is_none());
    for (name, experts) in stacks {
        let first_missing = (0..experts.len()).find(|expert| !experts.contains_key(expert));
        if let Some(expert) = first_missing {
            return Err(Error::MissingTensor(name.replace("_exps", &format!(".{expert}"))));
        }
        let parts: Vec<Tensor> = experts.into_values().collect();
        let (format, mut shape) = (parts[0].format, parts[0].shape.clone());
        for part in &parts {
            check_same_layout(part, format, &shape)?;
        }
        shape.truncate(2);
        shape.push(parts.len() as u64);
        file.add_tensor(&name, format, &shape, move |file| {
            let mut stack = Vec::with_capacity(parts.iter().map(|p| p.bytes as usize).sum());
            for part in &parts {
                stack.extend_from_slice(file.data(part));
                file.release(part);
            }
            stack
        })?;
    }
    Ok(())
}

/// Checks that a tensor has the format and the two-dimensional shape of its stack.
fn check_same_layout(tensor: &Tensor, format: Format, wanted: &[u64]) -> Result<()> {
    let name = tensor.name.clone();
    if tensor.format != format {
        let (found, wanted) = (tensor.format.name(), format.name());
        return Err(Error::Unsupported(format!("{name} as {found} beside others as {wanted}")));
    }
    if tensor.shape != wanted || wanted.len() != 2 {
        let found = tensor.shape.clone();
        return Err(Error::Shape { name, found, wanted: wanted.to_vec() });
    }
    Ok(())
}
