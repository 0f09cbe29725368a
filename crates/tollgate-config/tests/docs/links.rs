//! Every relative link leads to a file and a heading, on GitHub and in the book.

use std::path::{Component, Path, PathBuf};

use super::{pages, parts, read, root};

/// Returns the anchors of a page's headings, as GitHub and mdBook make them.
fn anchors(page: &str) -> Vec<String> {
    let prose = parts(page).1;
    let headings = prose.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let mut anchors: Vec<String> = Vec::new();
    for heading in headings {
        let lower = heading.to_lowercase().replace(' ', "-");
        let anchor: String = lower.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect();
        let twins = anchors.iter().filter(|other| **other == anchor).count();
        anchors.push(if twins == 0 { anchor } else { format!("{anchor}-{twins}") });
    }
    anchors
}

/// Returns the targets of the links in a page, those of images included.
fn links(page: &str) -> Vec<String> {
    let prose = parts(page).1;
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
    targets.filter(|link| !link.contains("://") && !link.starts_with("mailto:")).map(str::to_owned).collect()
}

/// Resolves `..` in a path from the root.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => assert!(plain.pop(), "{} leaves the repository", path.display()),
            part => plain.push(part),
        }
    }
    plain
}

#[test]
fn every_relative_link_leads_to_a_file_and_a_heading() {
    let pages = pages();
    let mut broken = Vec::new();
    for (name, page) in &pages {
        for link in links(page) {
            let (file, heading) = link.split_once('#').unwrap_or((&link, ""));
            let folder = Path::new(name).parent().unwrap_or(Path::new(""));
            let target = if file.is_empty() { PathBuf::from(name) } else { plain(&folder.join(file)) };
            if !root().join(&target).is_file() {
                broken.push(format!("{name}: {link}: there is no file {}", target.display()));
                continue;
            }
            let is_found = heading.is_empty() || anchors(&read(target.to_str().unwrap())).iter().any(|a| a == heading);
            if !is_found {
                broken.push(format!("{name}: {link}: {} has no such heading", target.display()));
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}

#[test]
fn every_page_is_in_the_book() {
    let summary = read("docs/SUMMARY.md");
    let listed: Vec<PathBuf> = links(&summary).iter().map(|link| plain(&Path::new("docs").join(link))).collect();
    for name in pages().keys().filter(|name| name.starts_with("docs/") && *name != "docs/SUMMARY.md") {
        assert!(listed.iter().any(|page| page == Path::new(name)), "docs/SUMMARY.md does not list {name}");
    }
}

/// The last column of the threat model has files and folders of tests, some with the name of one test.
#[test]
fn threat_model_names_tests_that_exist() {
    let page = read("docs/threat-model.md");
    let last_cells = page.lines().filter(|line| line.starts_with("| ")).filter_map(|row| row.rsplit(" | ").next());
    let spans: Vec<&str> = last_cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    assert!(spans.len() > 30, "{spans:?}");
    for span in spans {
        let (file, test) = span.split_once(": ").unwrap_or((span, ""));
        let path = if file.starts_with("tollgate/") || file.starts_with("crates/") {
            file.to_owned()
        } else {
            format!("tollgate-server/tests/{file}")
        };
        assert!(root().join(&path).exists(), "there is no {path}");
        assert!(test.is_empty() || read(&path).contains(&format!("fn {test}(")), "{path} has no test {test}");
    }
}

#[test]
fn anchors_are_those_of_github() {
    let page = "# `POST /v1/check`\n```yaml\n# not a heading\n```\n## When Redis fails\n## When Redis fails\n### on_store_failure\n";
    let anchors = anchors(page);
    assert_eq!(anchors, ["post-v1check", "when-redis-fails", "when-redis-fails-1", "on_store_failure"]);
}
