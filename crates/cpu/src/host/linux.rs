//! What Linux says of memory, in `/proc` and in control groups.

use std::path::Path;

/// Bytes that this process can still allocate, if the system says: those of the machine, or of the
/// container or the process if they have a limit.
pub(super) fn available_memory() -> Option<u64> {
    let machine = memory_info("MemAvailable:")?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = cgroup_memory(&groups, Path::new("/sys/fs/cgroup"));
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let mapped = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    [group, address_space(&limits, &mapped)].into_iter().flatten().chain([machine]).min()
}

/// Bytes that the process can still map, if its address space is limited (`ulimit -v`). The
/// arguments are the contents of `/proc/self/limits` and of `/proc/self/status`.
fn address_space(limits: &str, status: &str) -> Option<u64> {
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: u64 = limit.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(kilobytes(status, "VmSize:")?))
}

/// Bytes of the machine's memory.
pub(super) fn total_memory() -> Option<u64> {
    memory_info("MemTotal:")
}

/// Bytes of a line of `/proc/meminfo`.
fn memory_info(name: &str) -> Option<u64> {
    kilobytes(&std::fs::read_to_string("/proc/meminfo").ok()?, name)
}

/// Bytes of a line such as `VmSize: 1024 kB`.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

/// Bytes that control groups leave to this process, if they set a limit. `groups` is the content of
/// `/proc/self/cgroup`, `root` the folder of the hierarchies. Every group from the process's own up
/// to the root may have a limit, so the smallest rest counts.
fn cgroup_memory(groups: &str, root: &Path) -> Option<u64> {
    let rests = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let (root, rest): (_, fn(&Path) -> Option<u64>) = match controllers {
            "" => (root.to_owned(), rest_v2),
            list if list.split(',').any(|name| name == "memory") => (root.join("memory"), rest_v1),
            _ => return None,
        };
        // A process outside its namespace's root has a path that begins with `/..`.
        let own = if path.contains("..") { "" } else { path.trim_start_matches('/') };
        Path::new(own).ancestors().filter_map(|group| rest(&root.join(group))).min()
    });
    rests.min()
}

/// The rest of a group of version 2 below its hard limit and the limit from which on it is slowed
/// down. A limit of `max` is none.
fn rest_v2(group: &Path) -> Option<u64> {
    let limits = ["memory.max", "memory.high"].map(|name| number(group, name));
    let limit = limits.into_iter().flatten().min()?;
    let used = number(group, "memory.current")?.saturating_sub(file_cache(group, ""));
    Some(limit.saturating_sub(used))
}

/// The rest of a group of version 1. Its statistics include the limits of groups above it, also of
/// those that a container does not see.
fn rest_v1(group: &Path) -> Option<u64> {
    let statistics = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let inherited = statistics
        .lines()
        .find_map(|line| line.strip_prefix("hierarchical_memory_limit ")?.trim().parse().ok());
    let own = number(group, "memory.limit_in_bytes");
    let limit = [own, inherited].into_iter().flatten().min()?;
    let used = number(group, "memory.usage_in_bytes")?.saturating_sub(file_cache(group, "total_"));
    Some(limit.saturating_sub(used))
}

/// Bytes of files that the system keeps in a group's memory, and drops when others need it.
fn file_cache(group: &Path, prefix: &str) -> u64 {
    let statistics = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let bytes = |name: &str| -> Option<u64> {
        let name = format!("{prefix}{name} ");
        let line = statistics.lines().find_map(|line| line.strip_prefix(name.as_str()))?;
        line.trim().parse().ok()
    };
    ["inactive_file", "active_file"].into_iter().filter_map(bytes).sum()
}

fn number(group: &Path, name: &str) -> Option<u64> {
    std::fs::read_to_string(group.join(name)).ok()?.trim().parse().ok()
}

/// Linux does not say which cores are the fast ones.
pub(super) fn performance_cores() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A tree of control groups with these files.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn a_limited_address_space_counts() {
        let limits = |limit: &str| format!("Max address space         {limit} {limit} bytes\n");
        let status = "VmPeak:\t 300 kB\nVmSize:\t 200 kB\n";
        assert_eq!(address_space(&limits("1048576"), status), Some(1_048_576 - 204_800));
        assert_eq!(address_space(&limits("1024"), status), Some(0));
        assert_eq!(address_space(&limits("unlimited"), status), None);
        assert_eq!(address_space("", status), None);
    }

    #[test]
    fn every_level_of_version_2_limits() {
        let mut files = vec![
            ("memory.current", "900\n"),
            ("a/memory.max", "1000\n"),
            ("a/memory.current", "300\n"),
            ("a/b/memory.max", "max\n"),
            ("a/b/memory.high", "max\n"),
            ("a/b/memory.current", "200\n"),
            ("a/b/c/memory.max", "950\n"),
            ("a/b/c/memory.current", "100\n"),
        ];
        let rest = |files: &[_], own: &str| cgroup_memory(own, tree(files).path());
        // The group above has less left than the process's own.
        assert_eq!(rest(&files, "0::/a/b/c\n"), Some(700));
        assert_eq!(rest(&files, "0::/a/b\n"), Some(700));
        assert_eq!(rest(&files, "0::/\n"), None);
        // In a container without a namespace of its own the path does not exist below the mount.
        assert_eq!(rest(&files, "0::/docker/1\n"), None);
        files.push(("memory.max", "1500"));
        assert_eq!(rest(&files, "0::/docker/1\n"), Some(600));
        assert_eq!(rest(&files, "0::/../d\n"), Some(600));
        assert_eq!(rest(&files, "0::/a/b/c\n"), Some(600));
        files.push(("a/b/memory.high", "250"));
        assert_eq!(rest(&files, "1:name=systemd:/x\n0::/a/b/c\n"), Some(50));
        files.push(("a/b/c/memory.current", "960"));
        assert_eq!(rest(&files, "0::/a/b/c\n"), Some(0));
        // Pages of files can be dropped.
        files.push(("a/b/c/memory.stat", "anon 1\ninactive_file 30\nactive_file 20\n"));
        assert_eq!(rest(&files, "0::/a/b/c\n"), Some(40));
    }

    #[test]
    fn every_level_of_version_1_limits() {
        const NONE: &str = "9223372036854771712\n";
        let mut files = vec![
            ("memory/memory.limit_in_bytes", NONE),
            ("memory/memory.usage_in_bytes", "5000\n"),
            ("memory/a/memory.limit_in_bytes", "4000\n"),
            ("memory/a/memory.usage_in_bytes", "3000\n"),
            ("memory/a/b/memory.limit_in_bytes", NONE),
            ("memory/a/b/memory.usage_in_bytes", "2000\n"),
        ];
        let groups = "9:cpu,cpuacct:/a\n5:memory:/a/b\n0::/a\n";
        let rest = |files: &[_]| cgroup_memory(groups, tree(files).path());
        assert_eq!(rest(&files), Some(1000));
        files.push(("memory/a/b/memory.stat", "cache 1\nhierarchical_memory_limit 2500\n"));
        assert_eq!(rest(&files), Some(500));
        files.push(("memory/a/memory.stat", "inactive_file 9\ntotal_inactive_file 300\n"));
        files.push(("memory/a/b/memory.stat", "total_active_file 70\n"));
        assert_eq!(rest(&files), Some(1300));
        assert_eq!(cgroup_memory("9:cpu:/a\n", tree(&files).path()), None);
    }
}
