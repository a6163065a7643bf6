//! What the machine gives this process: cores and memory, with the limits that were put on it.

use std::fs;

pub use lapidary_cpu::available_cores;

/// Memory in bytes, as far as the system tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Of the machine.
    pub total: Option<u64>,
    /// That this process may still take: free or reclaimable, cut to the control group's and the process's limits.
    pub available: Option<u64>,
}

/// Asks the system. Both are unknown where there is no `/proc`.
pub fn memory() -> Memory {
    let read = |path: &str| fs::read_to_string(path).ok();
    let info = read("/proc/meminfo").unwrap_or_default();
    let own = read("/proc/self/cgroup").unwrap_or_default();
    let limits = read("/proc/self/limits").unwrap_or_default();
    let status = read("/proc/self/status").unwrap_or_default();
    let free = [kilobytes(&info, "MemAvailable:"), group_room(&own, read), address_room(&limits, &status)];
    Memory { total: kilobytes(&info, "MemTotal:"), available: free.into_iter().flatten().min() }
}

/// Cores of the machine, whether this process may use them or not.
pub fn machine_cores() -> Option<usize> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    Some(info.lines().filter(|l| l.starts_with("processor")).count()).filter(|&n| n > 0)
}

/// Bytes of the largest cache, as far as the system tells.
pub fn largest_cache() -> Option<u64> {
    let index =
        |i: usize| fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size")).ok();
    (0..8).filter_map(index).filter_map(|text| cache_size(text.trim())).max()
}

fn cache_size(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let unit = match unit {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What the tightest control group on the way up leaves. Cached file pages count as free: the kernel drops them first.
fn group_room(own: &str, read: impl Fn(&str) -> Option<String>) -> Option<u64> {
    let number = |path: &str| read(path)?.trim().parse::<u64>().ok();
    let mut least: Option<u64> = None;
    for line in own.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let (root, max, used) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
            c if c.split(',').any(|c| c == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        let mut path = path.trim_end_matches('/');
        loop {
            let at = format!("{root}{path}");
            if let (Some(max), Some(used)) = (number(&format!("{at}/{max}")), number(&format!("{at}/{used}")))
            {
                let stat = read(&format!("{at}/memory.stat")).unwrap_or_default();
                let cached = stat.lines().find_map(|l| l.strip_prefix("inactive_file "));
                let cached = cached.and_then(|n| n.trim().parse().ok()).unwrap_or(0);
                let room = max.saturating_sub(used.saturating_sub(cached));
                least = Some(least.map_or(room, |l| l.min(room)));
            }
            match path.rfind('/') {
                Some(cut) => path = &path[..cut],
                None => break,
            }
        }
    }
    least
}

/// What a limit on the address space leaves.
fn address_room(limits: &str, status: &str) -> Option<u64> {
    let line = limits.lines().find_map(|l| l.strip_prefix("Max address space"))?;
    let soft: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(soft.saturating_sub(kilobytes(status, "VmSize:").unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_group_on_the_path_counts() {
        let read = |path: &str| {
            let text = match path {
                "/sys/fs/cgroup/a/b/memory.max" => "max",
                "/sys/fs/cgroup/a/memory.max" => "1000",
                "/sys/fs/cgroup/a/memory.current" => "700",
                "/sys/fs/cgroup/a/memory.stat" => "anon 400\ninactive_file 250\n",
                "/sys/fs/cgroup/memory.max" => "5000",
                "/sys/fs/cgroup/memory.current" => "3000",
                _ => return None,
            };
            Some(text.to_string())
        };
        assert_eq!(group_room("0::/a/b\n", read), Some(1000 - (700 - 250)));
        assert_eq!(group_room("0::/\n", read), Some(2000));
        assert_eq!(group_room("4:cpu:/a\n", read), None);
    }

    #[test]
    fn a_limit_on_the_address_space_counts() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max address space         500000               unlimited            bytes     \n";
        assert_eq!(address_room(limits, "VmPeak:\t 9 kB\nVmSize:\t     100 kB\n"), Some(500_000 - 102_400));
        assert_eq!(address_room(&limits.replace("500000", "unlimited"), ""), None);
    }

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(cache_size("32768K"), Some(32 << 20));
        assert_eq!(cache_size("big"), None);
        assert_eq!(
            kilobytes("MemTotal:       24 kB\nMemAvailable:   7 kB\n", "MemAvailable:"),
            Some(7 * 1024)
        );
    }
}
