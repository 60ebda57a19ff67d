//! Changes to an open file, in memory only: other metadata, other names, tensors that are derived
//! from others. Derived data are computed on first use.

use std::collections::HashSet;
use std::sync::OnceLock;

use super::{Bytes, Derived, File, Recipe};
use crate::error::{Error, Mismatch, Result};
use crate::format::Format;
use crate::metadata::Metadata;
use crate::tensor::{Tensor, fixed_bytes};

impl File {
    /// The metadata, mutable.
    pub fn metadata_mut(&mut self) -> &mut Metadata {
        &mut self.metadata
    }

    /// Renames the tensors for which `rename` returns a name. Fails if two names become equal.
    pub fn rename_tensors(&mut self, rename: impl Fn(&str) -> Option<String>) -> Result<()> {
        let new_name =
            |tensor: &Tensor| rename(&tensor.name).unwrap_or_else(|| tensor.name.clone());
        let names: Vec<String> = self.tensors.iter().map(new_name).collect();
        let mut distinct = HashSet::new();
        if let Some(twice) = names.iter().find(|name| !distinct.insert(name.as_str())) {
            return Err(self.duplicate(twice));
        }
        self.tensors.iter_mut().zip(names).for_each(|(tensor, name)| tensor.name = name);
        self.reindex();
        Ok(())
    }

    /// Removes the tensors for which `keep` is false. Recipes can still read their data.
    pub fn retain_tensors(&mut self, keep: impl FnMut(&Tensor) -> bool) {
        self.tensors.retain(keep);
        self.reindex();
    }

    /// Adds a tensor whose data `recipe` computes on first use: exactly the bytes that format and
    /// shape require. Fails if the name exists, if the shape is invalid, or if rows of the format
    /// differ in length.
    pub fn add_tensor(
        &mut self,
        name: &str,
        format: Format,
        shape: &[u64],
        recipe: impl Fn(&File) -> Vec<u8> + Send + Sync + 'static,
    ) -> Result<()> {
        if self.by_name.contains_key(name) {
            return Err(self.duplicate(name));
        }
        let bytes =
            fixed_bytes(format, shape).map_err(|mismatch| mismatch.in_tensor(&self.path, name))?;
        let (name, shape) = (name.to_string(), shape.to_vec());
        let shard = self.add_derived(Box::new(recipe));
        self.by_name.insert(name.clone(), self.tensors.len());
        self.tensors.push(Tensor { name, format, shape, offset: 0, bytes, shard });
        Ok(())
    }

    /// Replaces the data of the tensor at `index` by `convert` of them, of the same size.
    pub(super) fn convert_tensor(&mut self, index: usize, convert: fn(&[u8]) -> Vec<u8>) {
        let stored = self.tensors[index].clone();
        let shard = self.add_derived(Box::new(move |file| {
            let bytes = convert(file.data(&stored));
            file.release(&stored);
            bytes
        }));
        let tensor = &mut self.tensors[index];
        (tensor.shard, tensor.offset) = (shard, 0);
    }

    fn add_derived(&mut self, recipe: Recipe) -> usize {
        self.shards.push(Bytes::Derived(Derived { recipe, cached: OnceLock::new() }));
        self.shards.len() - 1
    }

    fn reindex(&mut self) {
        let names = self.tensors.iter().enumerate();
        self.by_name = names.map(|(index, tensor)| (tensor.name.clone(), index)).collect();
    }

    fn duplicate(&self, name: &str) -> Error {
        let expected = "one tensor of this name".to_owned();
        Mismatch { expected, found: "a second one".to_owned() }.in_tensor(&self.path, name)
    }
}
