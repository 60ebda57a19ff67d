//! Changes to an open file, in memory only: other metadata, other names, tensors whose data are
//! made of others. Nothing is read or copied before somebody asks for such data.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::sync::OnceLock;

use super::{Bytes, File};
use crate::header::quoted;
use crate::metadata::Metadata;
use crate::tensor::fixed_bytes;
use crate::{Error, Format, Result, Tensor};

/// Makes a tensor's data from those of others. What it reads must not be made of the result.
type Recipe = Box<dyn Fn(&File) -> Vec<u8> + Send + Sync>;

/// Data that are made when they are asked for, and kept if that was not for one reading only.
pub(super) struct Made {
    recipe: Recipe,
    bytes: OnceLock<Vec<u8>>,
}

impl Made {
    pub(super) fn bytes(&self, file: &File) -> &[u8] {
        self.bytes.get_or_init(|| (self.recipe)(file))
    }

    pub(super) fn read<'a>(&'a self, file: &File) -> Cow<'a, [u8]> {
        self.bytes
            .get()
            .map_or_else(|| Cow::Owned((self.recipe)(file)), |b| Cow::Borrowed(b.as_slice()))
    }
}

impl fmt::Debug for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Made").field(&self.bytes.get().map(Vec::len)).finish()
    }
}

impl File {
    /// The metadata, to be changed.
    pub fn metadata_mut(&mut self) -> &mut Metadata {
        &mut self.metadata
    }

    /// Gives tensors other names: `rename` says which. Fails if two would have the same.
    pub fn rename_tensors(&mut self, rename: impl Fn(&str) -> Option<String>) -> Result<()> {
        let new = |tensor: &Tensor| rename(&tensor.name).unwrap_or_else(|| tensor.name.clone());
        let names: Vec<String> = self.tensors.iter().map(new).collect();
        let mut distinct = HashSet::new();
        if let Some(twice) = names.iter().find(|name| !distinct.insert(name.as_str())) {
            return Err(self.second(twice));
        }
        self.tensors.iter_mut().zip(names).for_each(|(tensor, name)| tensor.name = name);
        self.list_names();
        Ok(())
    }

    /// Leaves out the tensors that `keep` does not want. Their data can still be read.
    pub fn retain_tensors(&mut self, keep: impl FnMut(&Tensor) -> bool) {
        self.tensors.retain(keep);
        self.list_names();
    }

    /// Adds a tensor whose data `recipe` makes when they are first asked for: exactly as many bytes
    /// as format and shape take. Fails if there is one of this name, if the shape is impossible, or
    /// if rows of the format differ in length.
    pub fn add_tensor(
        &mut self,
        name: &str,
        format: Format,
        shape: &[u64],
        recipe: impl Fn(&File) -> Vec<u8> + Send + Sync + 'static,
    ) -> Result<()> {
        if self.by_name.contains_key(name) {
            return Err(self.second(name));
        }
        let bytes = fixed_bytes(format, shape).map_err(|bad| {
            let item = format!("tensor {}", quoted(name));
            Error::invalid(&self.path, item, bad.expected, bad.found)
        })?;
        let (name, shape) = (name.to_string(), shape.to_vec());
        let shard = self.add_made(Box::new(recipe));
        self.by_name.insert(name.clone(), self.tensors.len());
        self.tensors.push(Tensor { name, format, shape, offset: 0, bytes, shard });
        Ok(())
    }

    /// Has the data of the tensor at `index` made of what they were, in as many bytes.
    pub(super) fn remake(&mut self, index: usize, remake: fn(&[u8]) -> Vec<u8>) {
        let stored = self.tensors[index].clone();
        let shard = self.add_made(Box::new(move |file| {
            let bytes = remake(file.data(&stored));
            file.release(&stored);
            bytes
        }));
        let tensor = &mut self.tensors[index];
        (tensor.shard, tensor.offset) = (shard, 0);
    }

    fn add_made(&mut self, recipe: Recipe) -> usize {
        self.shards.push(Bytes::Made(Made { recipe, bytes: OnceLock::new() }));
        self.shards.len() - 1
    }

    fn list_names(&mut self) {
        let names = self.tensors.iter().enumerate();
        self.by_name = names.map(|(index, tensor)| (tensor.name.clone(), index)).collect();
    }

    fn second(&self, name: &str) -> Error {
        let item = format!("tensor {}", quoted(name));
        Error::invalid(&self.path, item, "one tensor of this name", "a second one")
    }
}
