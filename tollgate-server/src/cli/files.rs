//! `tollgate schema`, `completions` and `man`: files that editors, shells and `man` read.
//!
//! All of them are made from the types and arguments of this binary, so they always fit its version.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::builder::Resettable;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};
use tollgate_config as file;

use super::{Cli, Completion, Error, print, print_bytes};

pub(super) const SCHEMA_EXAMPLES: &str = "\
Examples:
  tollgate schema > tollgate.schema.json

The first line of a rule file then makes editors check and complete it:
  # yaml-language-server: $schema=tollgate.schema.json";

pub(super) const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  tollgate completions bash > ~/.local/share/bash-completion/completions/tollgate
  tollgate completions zsh > \"${fpath[1]}/_tollgate\"
  tollgate completions fish > ~/.config/fish/completions/tollgate.fish";

pub(super) const MAN_EXAMPLES: &str = "\
Examples:
  tollgate man | man -l -
  tollgate man ~/.local/share/man/man1";

#[derive(clap::Args)]
pub(super) struct CompletionsArguments {
    /// Shell to complete commands in
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(clap::Args)]
pub(super) struct ManArguments {
    /// Existing directory for the manual pages of all commands; without it, the main page is printed
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
}

/// Prints the JSON Schema of the rule file.
pub(super) fn schema() -> Result<Completion, Error> {
    print(format_args!("{:#}", file::schema()))?;
    Ok(Completion::Positive)
}

/// Prints a completion script.
pub(super) fn completions(arguments: &CompletionsArguments) -> Result<Completion, Error> {
    let mut script = Vec::new();
    let mut command = Cli::command();
    let name = command.get_name().to_owned();
    clap_complete::generate(arguments.shell, &mut command, name, &mut script);
    print_bytes(&script)?;
    Ok(Completion::Positive)
}

/// Prints the main manual page, or writes the pages of all commands.
pub(super) fn man(arguments: &ManArguments) -> Result<Completion, Error> {
    // The pages of `help` and its subcommands would repeat the others.
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    match &arguments.directory {
        Some(directory) => write_pages(&command, directory).map_err(|error| cannot_write(directory, &error))?,
        None => print_bytes(&page(&command).map_err(Error::Runtime)?.1)?,
    }
    Ok(Completion::Positive)
}

fn write_pages(command: &Command, directory: &Path) -> io::Result<()> {
    let (name, text) = page(command)?;
    fs::write(directory.join(name), text)?;
    command.get_subcommands().try_for_each(|subcommand| write_pages(subcommand, directory))
}

/// Returns the file name and the text of a manual page. The examples are a section of their own, line by line, where
/// clap_mangen would fill paragraphs with them.
fn page(command: &Command) -> io::Result<(String, Vec<u8>)> {
    let man = Man::new(command.clone().after_help(Resettable::Reset));
    let mut text = Vec::new();
    man.render(&mut text)?;
    if let Some(examples) = command.get_after_help() {
        let mut section = Roff::new();
        section.control("SH", ["EXAMPLES"]).control("nf", []);
        for line in examples.to_string().lines().filter(|line| *line != "Examples:") {
            section.text([roman(line)]);
        }
        section.control("fi", []).to_writer(&mut text)?;
    }
    Ok((man.get_filename(), text))
}

fn cannot_write(directory: &Path, error: &io::Error) -> Error {
    let directory = directory.display();
    Error::Usage(format!("cannot write manual pages to {directory}: {error}: name an existing, writable directory"))
}
