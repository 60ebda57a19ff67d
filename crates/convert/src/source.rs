//! The files of a model: those of a folder, or those of a folder inside a zip file. It must not
//! know what they hold.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Take};
use std::path::{Path, PathBuf};

use flate2::CrcReader;
use flate2::read::DeflateDecoder;
use serde_json::Value;
use zip::{CompressionMethod, ZipArchive};

use crate::error::{Error, Result};

/// Files other than weights may have this size.
const SMALL_BYTES_MAX: u64 = 256 << 20;
/// The most of one JSON file in memory, by its punctuation, in parts of 36 bytes: a value takes
/// two, and a list or an object with its spare room eight. A vocabulary of 262 144 tokens with its
/// merges has seven million.
const JSON_PARTS_MAX: usize = 8_000_000;
/// Weights hardly compress; what expands more is a zip bomb.
const EXPANSION_MAX: u64 = 200;

/// The files of one model.
pub(crate) struct Source {
    /// Path of the folder or the zip file.
    path: PathBuf,
    place: Place,
}

enum Place {
    Folder,
    Zip {
        archive: RefCell<ZipArchive<File>>,
        /// Index in the archive, by path within the model's folder.
        members: BTreeMap<String, usize>,
        /// The model's folder in the archive, without `/` at its end.
        folder: String,
    },
}

impl Source {
    /// Opens a folder, or the only folder with a model in a zip file.
    pub(crate) fn open(path: &Path) -> Result<Source> {
        let shown = path.display().to_string();
        let metadata = fs::metadata(path).map_err(Error::io(&shown))?;
        if metadata.is_dir() {
            return Ok(Source { path: path.to_owned(), place: Place::Folder });
        }
        let expected = "a folder, a wheel or a zip file";
        if !metadata.is_file() {
            let found = bodkin_gguf::kind_of_file(metadata.file_type());
            return Err(Error::invalid(shown, expected, found));
        }
        let file = File::open(path).map_err(Error::io(&shown))?;
        let archive = ZipArchive::new(file)
            .map_err(|error| Error::invalid(&shown, expected, error.to_string()))?;
        let names: Vec<Option<String>> =
            archive.file_names().map(|name| Some(name.ok()?.into_owned())).collect();
        let folder = model_folder(&shown, names.iter().flatten())?;
        let members = names.iter().enumerate().filter_map(|(index, name)| {
            let inside = match folder.as_str() {
                "" => name.as_deref()?,
                folder => name.as_deref()?.strip_prefix(folder)?.strip_prefix('/')?,
            };
            Some((inside.to_owned(), index))
        });
        let members = members.collect();
        let archive = RefCell::new(archive);
        Ok(Source { path: path.to_owned(), place: Place::Zip { archive, members, folder } })
    }

    /// The name of the model's folder.
    pub(crate) fn folder_name(&self) -> String {
        let path = match &self.place {
            Place::Zip { folder, .. } if !folder.is_empty() => PathBuf::from(folder),
            Place::Zip { .. } => self.path.with_extension(""),
            Place::Folder => self.path.canonicalize().unwrap_or_else(|_| self.path.clone()),
        };
        path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// How error messages call a file.
    pub(crate) fn shown(&self, name: &str) -> String {
        match &self.place {
            Place::Zip { folder, .. } if !folder.is_empty() => {
                format!("{}: {folder}/{name}", self.path.display())
            }
            Place::Zip { .. } => format!("{}: {name}", self.path.display()),
            Place::Folder => self.path.join(name).display().to_string(),
        }
    }

    /// Names of the files directly in the model's folder, sorted.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let mut names: Vec<String> = match &self.place {
            Place::Zip { members, .. } => {
                members.keys().filter(|name| !name.contains('/')).cloned().collect()
            }
            Place::Folder => {
                let entries = fs::read_dir(&self.path);
                let entries = entries.map_err(Error::io(self.path.display().to_string()))?;
                entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
            }
        };
        names.sort();
        Ok(names)
    }

    /// A file that is small enough for memory; None if there is none of this name, which is a path
    /// within the model's folder.
    pub(crate) fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(mut file) = self.stream(name)? else { return Ok(None) };
        let shown = self.shown(name);
        if file.bytes() > SMALL_BYTES_MAX {
            let expected = format!("at most {SMALL_BYTES_MAX} bytes");
            return Err(Error::invalid(shown, expected, file.bytes().to_string()));
        }
        let bytes = file.bytes();
        file.read_at(0, bytes).map(Some).map_err(Error::io(shown))
    }

    /// A JSON file; None if there is none of this name.
    pub(crate) fn json(&self, name: &str) -> Result<Option<Value>> {
        let Some(bytes) = self.read(name)? else { return Ok(None) };
        check_json(&self.shown(name), &bytes)?;
        let parsed = serde_json::from_slice(&bytes);
        parsed
            .map(Some)
            .map_err(|error| Error::invalid(self.shown(name), "JSON", error.to_string()))
    }

    /// A text file; None if there is none of this name.
    pub(crate) fn text(&self, name: &str) -> Result<Option<String>> {
        let Some(bytes) = self.read(name)? else { return Ok(None) };
        let text = String::from_utf8(bytes);
        text.map(Some).map_err(|error| Error::invalid(self.shown(name), "UTF-8", error.to_string()))
    }

    /// Opens a file of any size; None if there is none of this name.
    pub(crate) fn stream(&self, name: &str) -> Result<Option<Stream>> {
        // Names come from the model's own files, which must not reach others.
        let is_inside = |part: &str| !part.is_empty() && part != "." && part != "..";
        if !name.split('/').all(is_inside) || name.contains(['\\', '\0', ':']) {
            let item = self.path.display().to_string();
            return Err(Error::invalid(item, "the name of a file in the model's folder", name));
        }
        match &self.place {
            Place::Folder => self.stream_file(name),
            Place::Zip { archive, members, .. } => {
                let Some(&index) = members.get(name) else { return Ok(None) };
                self.stream_member(&mut archive.borrow_mut(), index, &self.shown(name)).map(Some)
            }
        }
    }

    fn stream_file(&self, name: &str) -> Result<Option<Stream>> {
        let path = self.path.join(name);
        let shown = path.display().to_string();
        // Before it is opened: that of a pipe would wait for a writer.
        let metadata = match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata.map_err(Error::io(&shown))?,
        };
        if !metadata.is_file() {
            let found = bodkin_gguf::kind_of_file(metadata.file_type());
            return Err(Error::invalid(shown, "a file", found));
        }
        let file = File::open(&path).map_err(Error::io(&shown))?;
        Ok(Some(Stream { bytes: metadata.len(), data: Data::Plain { file, start: 0 } }))
    }

    fn stream_member(
        &self,
        archive: &mut ZipArchive<File>,
        index: usize,
        shown: &str,
    ) -> Result<Stream> {
        let invalid = |expected: &str, found: String| Error::invalid(shown, expected, found);
        let member = archive.by_index(index);
        let member = member.map_err(|error| invalid("a member", error.to_string()))?;
        let (bytes, packed) = (member.size(), member.compressed_size());
        let start = member.data_start().ok_or_else(|| invalid("data", "none".to_owned()))?;
        let (method, crc) = (member.compression(), member.crc32());
        if bytes > packed.saturating_mul(EXPANSION_MAX) {
            let expected = format!("at most {EXPANSION_MAX} times its {packed} packed bytes");
            return Err(invalid(&expected, format!("{bytes} bytes")));
        }
        drop(member);
        let file = File::open(&self.path).map_err(Error::io(shown))?;
        let end = file.metadata().map_err(Error::io(shown))?.len();
        if start.checked_add(packed).is_none_or(|last| last > end) {
            return Err(invalid(&format!("data before byte {end}"), format!("byte {start}")));
        }
        let data = match method {
            CompressionMethod::Stored if bytes == packed => Data::Plain { file, start },
            CompressionMethod::Deflated => {
                Data::Deflated(Box::new(Deflated { file, start, packed, crc, reader: None }))
            }
            method => return Err(invalid("a stored or deflated member", method.to_string())),
        };
        Ok(Stream { bytes, data })
    }
}

/// The folder that holds a configuration and weights; of several the one above the others.
fn model_folder<'a>(shown: &str, names: impl Iterator<Item = &'a String>) -> Result<String> {
    let mut folders: BTreeMap<&str, [bool; 3]> = BTreeMap::new();
    for name in names {
        let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
        let found = folders.entry(folder).or_default();
        found[0] |= file == "config.json";
        found[1] |= file.ends_with(".safetensors");
        found[2] |= file.ends_with(".bin") || file.ends_with(".pt") || file.ends_with(".pth");
    }
    let expected = "one folder with config.json and *.safetensors inside";
    let models = || folders.iter().filter(|(_, found)| found[0] && found[1]).map(|(name, _)| *name);
    let depth = |name: &str| if name.is_empty() { 0 } else { 1 + name.matches('/').count() };
    let Some(least) = models().map(depth).min() else {
        let pickled = folders.values().any(|found| found[0] && found[2]);
        let found = if pickled { "weights as pickles, which may run code" } else { "none" };
        return Err(Error::invalid(shown, expected, found));
    };
    let top: Vec<&str> = models().filter(|name| depth(name) == least).collect();
    match top[..] {
        [one] => Ok(one.to_owned()),
        _ => Err(Error::invalid(shown, expected, top.join(", "))),
    }
}

/// A file that is read in pieces.
pub(crate) struct Stream {
    bytes: u64,
    data: Data,
}

enum Data {
    Plain { file: File, start: u64 },
    Deflated(Box<Deflated>),
}

/// A deflated member of a zip file. Reading backwards starts again at its beginning.
struct Deflated {
    file: File,
    start: u64,
    /// Its size in the zip file.
    packed: u64,
    crc: u32,
    reader: Option<CrcReader<DeflateDecoder<Take<File>>>>,
}

impl Stream {
    /// The size of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Some bytes from `offset` on.
    pub(crate) fn read_at(&mut self, offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ends too early"));
        }
        let mut out = Vec::new();
        match &mut self.data {
            Data::Plain { file, start } => {
                file.seek(SeekFrom::Start(*start + offset))?;
                out.reserve_exact(bytes as usize);
                file.take(bytes).read_to_end(&mut out)?;
            }
            Data::Deflated(deflated) => deflated.read_at(offset, bytes, &mut out)?,
        }
        if out.len() as u64 != bytes {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ends too early"));
        }
        if let Data::Deflated(deflated) = &self.data
            && offset + bytes == self.bytes
        {
            deflated.check_crc()?;
        }
        Ok(out)
    }
}

impl Deflated {
    fn read_at(&mut self, offset: u64, bytes: u64, out: &mut Vec<u8>) -> io::Result<()> {
        let position =
            |reader: &CrcReader<DeflateDecoder<Take<File>>>| reader.get_ref().total_out();
        if self.reader.as_ref().is_none_or(|reader| position(reader) > offset) {
            let mut file = self.file.try_clone()?;
            file.seek(SeekFrom::Start(self.start))?;
            let reader = CrcReader::new(DeflateDecoder::new(file.take(self.packed)));
            self.reader = Some(reader);
        }
        let Some(reader) = &mut self.reader else { return Ok(()) };
        let gap = offset - position(reader);
        io::copy(&mut reader.by_ref().take(gap), &mut io::sink())?;
        reader.by_ref().take(bytes).read_to_end(out)?;
        Ok(())
    }

    /// Fails if the bytes that were read are not those that were packed. They begin at the start.
    fn check_crc(&self) -> io::Result<()> {
        match self.reader.as_ref().is_none_or(|reader| reader.crc().sum() == self.crc) {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::InvalidData, "its checksum is wrong")),
        }
    }
}

/// Fails if the values of a JSON file take too much memory.
pub(crate) fn check_json(shown: &str, json: &[u8]) -> Result<()> {
    let parts = |&byte: &u8| match byte {
        b',' => 2,
        b'[' | b'{' => 8,
        _ => 0,
    };
    let found: usize = json.iter().map(parts).sum();
    if found <= JSON_PARTS_MAX {
        return Ok(());
    }
    let expected = format!("values of at most {} MB in memory", JSON_PARTS_MAX * 36 / 1_000_000);
    Err(Error::invalid(shown, expected, format!("about {} MB", found * 36 / 1_000_000)))
}
