//! Parses PTX to kernels: resolves names to registers and addresses, and inlines functions.

use std::collections::HashMap;
use std::iter::Peekable;
use std::vec::IntoIter;

use crate::Fault;
use crate::decode::{Arg, decode};
use crate::kernel::{Instruction, Kernel, Op, Register, SPECIAL_REGISTERS};
use crate::lexer::{Token, is_number, number, tokens};
use crate::registers::allocate_registers;

/// The unparsed text of a kernel or a function, from its name on.
struct Source {
    text: String,
    line: u32,
}

/// A PTX file.
pub(crate) struct Module {
    kernels: HashMap<String, Source>,
    functions: HashMap<String, Source>,
    /// Declarations of shared memory outside kernels.
    shared: String,
}

impl Module {
    /// Splits a file into kernels, functions and shared declarations.
    pub(crate) fn new(text: &str) -> Module {
        let [mut kernels, mut functions] = [HashMap::new(), HashMap::new()];
        let mut shared = String::new();
        let mut lines = text.lines().zip(1..);
        while let Some((line, number)) = lines.next() {
            if line.starts_with(".shared") || line.starts_with(".extern .shared") {
                shared.push_str(line);
            }
            let (of, rest) = match line.strip_prefix(".visible .entry ") {
                Some(rest) => (&mut kernels, rest),
                None => match line.strip_prefix(".func ") {
                    Some(rest) => (&mut functions, rest),
                    None => continue,
                },
            };
            let name = rest.split('(').next().unwrap_or_default().to_owned();
            let mut text = rest.to_owned();
            for (line, _) in lines.by_ref().take_while(|(line, _)| *line != "}") {
                text.push('\n');
                text.push_str(line);
            }
            of.insert(name, Source { text, line: number });
        }
        Module { kernels, functions, shared }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.kernels.contains_key(name)
    }

    /// Parses a kernel of the file.
    pub(crate) fn kernel(&self, name: &str) -> Result<Kernel, Fault> {
        let mut parser = Parser {
            module: self,
            kernel: Kernel { name: name.to_owned(), ..Kernel::default() },
            scopes: vec![Scope::default()],
            constants: HashMap::new(),
            dynamic_alignment: 1,
            tokens: Vec::new().into_iter().peekable(),
            line: 0,
        };
        parser.parse_kernel(&self.kernels[name]).map_err(|Fault(text)| {
            Fault(format!("{name}, line {} of its PTX: {text}", parser.line))
        })?;
        allocate_registers(&mut parser.kernel, SPECIAL_REGISTERS.len() as u32);
        Ok(parser.kernel)
    }
}

/// The meaning of a name.
#[derive(Clone, Copy)]
enum Name {
    Register(Register),
    Predicate(Register),
    /// An offset in the state space of the instruction.
    Address(u64),
    /// The register of a function's parameter.
    Parameter(Register),
}

/// A scope of names, `{ ... }`.
#[derive(Default)]
struct Scope<'a> {
    names: HashMap<&'a str, Name>,
    labels: HashMap<&'a str, usize>,
    /// Branch instructions and their labels, not yet resolved.
    branches: Vec<(usize, &'a str)>,
    /// The label at the end of an inlined function, the target of `ret`.
    end: Option<&'a str>,
}

struct Parser<'a> {
    module: &'a Module,
    kernel: Kernel,
    scopes: Vec<Scope<'a>>,
    constants: HashMap<u64, Register>,
    /// Of dynamic shared memory, in bytes.
    dynamic_alignment: usize,
    /// The remaining tokens.
    tokens: Peekable<IntoIter<Token<'a>>>,
    line: u32,
}

impl<'a> Parser<'a> {
    fn parse_kernel(&mut self, source: &'a Source) -> Result<(), Fault> {
        for special in SPECIAL_REGISTERS {
            let register = self.register();
            self.declare(special, Name::Register(register));
        }
        self.tokens = tokens(&self.module.shared, 0).into_iter().peekable();
        while self.tokens.peek().is_some() {
            self.statement()?;
        }
        self.tokens = tokens(&source.text, source.line).into_iter().peekable();
        for (name, bytes) in self.header()? {
            let at = self.kernel.parameter_bytes.next_multiple_of(8);
            self.declare(name, Name::Address(at as u64));
            self.kernel.parameter_bytes = at + bytes;
        }
        while self.tokens.peek().is_some() {
            self.statement()?;
        }
        self.push(Op::Return);
        self.close()?;
        let bytes = &mut self.kernel.shared_bytes;
        *bytes = bytes.next_multiple_of(self.dynamic_alignment);
        Ok(())
    }

    fn next(&mut self) -> Result<&'a str, Fault> {
        let token = self.tokens.next().ok_or_else(|| Fault("the text ends".to_owned()))?;
        self.line = token.line;
        Ok(token.text)
    }

    fn is_next(&mut self, text: &str) -> bool {
        self.tokens.next_if(|token| token.text == text).is_some()
    }

    fn expect(&mut self, text: &str) -> Result<(), Fault> {
        let found = self.next()?;
        if found == text { Ok(()) } else { Err(Fault(format!("expected {text}, found {found}"))) }
    }

    fn skip_to(&mut self, text: &str) -> Result<(), Fault> {
        while self.next()? != text {}
        Ok(())
    }

    fn declare(&mut self, name: &'a str, what: Name) {
        self.scopes.last_mut().expect("a scope is open").names.insert(name, what);
    }

    fn register(&mut self) -> Register {
        self.kernel.registers += 1;
        self.kernel.registers - 1
    }

    fn predicate(&mut self) -> Register {
        self.kernel.predicates += 1;
        self.kernel.predicates - 1
    }

    fn constant(&mut self, bits: u64) -> Register {
        if let Some(&register) = self.constants.get(&bits) {
            return register;
        }
        let register = self.register();
        self.constants.insert(bits, register);
        self.kernel.constants.push((register, bits));
        register
    }

    fn find(&self, name: &str) -> Result<Name, Fault> {
        let found = self.scopes.iter().rev().find_map(|scope| scope.names.get(name));
        found.copied().ok_or_else(|| Fault(format!("unknown name {name}")))
    }

    fn push(&mut self, op: Op) {
        let instruction = Instruction { line: self.line, ..Instruction::new(op) };
        self.kernel.code.push(instruction);
    }

    /// The names and bytes of the parameters of a kernel or function.
    fn header(&mut self) -> Result<Vec<(&'a str, usize)>, Fault> {
        let mut parameters = Vec::new();
        self.skip_to("(")?;
        while !self.is_next(")") {
            let mut name = self.next()?;
            while !matches!(self.tokens.peek().map(|token| token.text), Some("[" | "," | ")")) {
                name = self.next()?;
            }
            let mut bytes = 8;
            if self.is_next("[") {
                bytes = number(self.next()?)? as usize;
                self.expect("]")?;
            }
            parameters.push((name, bytes));
            self.is_next(",");
        }
        self.skip_to("{")?;
        Ok(parameters)
    }

    fn statement(&mut self) -> Result<(), Fault> {
        let first = self.next()?;
        match first {
            "{" => self.scopes.push(Scope::default()),
            "}" => self.close()?,
            ".reg" => self.registers()?,
            ".param" => {
                self.next()?;
                let name = self.next()?;
                let register = self.register();
                self.declare(name, Name::Parameter(register));
                self.expect(";")?;
            }
            ".shared" | ".extern" | ".local" => self.variable(first)?,
            ".pragma" => self.skip_to(";")?,
            _ if self.is_next(":") => {
                let here = self.kernel.code.len();
                self.scopes.last_mut().expect("a scope is open").labels.insert(first, here);
            }
            _ => self.instruction(first)?,
        }
        Ok(())
    }

    /// Ends a scope: resolves its branches, or passes them to the enclosing scope.
    fn close(&mut self) -> Result<(), Fault> {
        let scope = self.scopes.pop().ok_or_else(|| Fault("a } too many".to_owned()))?;
        for (at, label) in scope.branches {
            match (scope.labels.get(label), self.scopes.last_mut()) {
                (Some(&target), _) => self.kernel.code[at].offset = target as i64,
                (None, Some(outer)) => outer.branches.push((at, label)),
                (None, None) => return Err(Fault(format!("unknown label {label}"))),
            }
        }
        Ok(())
    }

    /// `.reg .b32 %r<12>;` or `.reg .b32 a, b;`
    fn registers(&mut self) -> Result<(), Fault> {
        let is_predicate = self.next()? == ".pred";
        loop {
            let name = self.next()?;
            let mut names = vec![name];
            if self.is_next("<") {
                let count = number(self.next()?)?;
                self.expect(">")?;
                // Leaked: the emulator parses few kernels.
                names = (0..count).map(|i| &*format!("{name}{i}").leak()).collect();
            }
            for name in names {
                let what = match is_predicate {
                    true => Name::Predicate(self.predicate()),
                    false => Name::Register(self.register()),
                };
                self.declare(name, what);
            }
            if !self.is_next(",") {
                return self.expect(";");
            }
        }
    }

    /// `.shared .align 16 .b8 name[64];`, without a size for dynamic shared memory.
    fn variable(&mut self, space: &str) -> Result<(), Fault> {
        self.skip_to(".align")?;
        let alignment = number(self.next()?)? as usize;
        let unit = match self.next()? {
            ".b8" | ".u8" => 1,
            ".b16" | ".u16" => 2,
            ".b32" | ".u32" | ".f32" => 4,
            ".b64" | ".u64" | ".f64" => 8,
            other => return Err(Fault(format!("unknown type {other}"))),
        };
        let name = self.next()?;
        let mut count = 1;
        if self.is_next("[") {
            count = if self.is_next("]") { 0 } else { number(self.next()?)? as usize };
            if count > 0 {
                self.expect("]")?;
            }
        }
        self.expect(";")?;
        if space == ".extern" {
            self.dynamic_alignment = self.dynamic_alignment.max(alignment);
            let dynamic = self.find("%dynamic")?;
            self.declare(name, dynamic);
            return Ok(());
        }
        let used = match space {
            ".local" => &mut self.kernel.local_bytes,
            _ => &mut self.kernel.shared_bytes,
        };
        let at = used.next_multiple_of(alignment);
        *used = at + unit * count;
        self.declare(name, Name::Address(at as u64));
        Ok(())
    }

    fn instruction(&mut self, first: &'a str) -> Result<(), Fault> {
        let mut opcode = first;
        let mut guard = None;
        if first == "@" {
            let wanted = !self.is_next("!");
            let name = self.next()?;
            let Name::Predicate(predicate) = self.find(name)? else {
                return Err(Fault(format!("{name} is no predicate")));
            };
            guard = Some((predicate, wanted));
            opcode = self.next()?;
        }
        let at = self.kernel.code.len();
        let line = self.line;
        match opcode {
            "bra" | "bra.uni" => {
                let label = self.next()?;
                self.scopes.last_mut().expect("a scope is open").branches.push((at, label));
                self.push(Op::Branch);
            }
            "ret" => match self.scopes.iter().rev().find_map(|scope| scope.end) {
                Some(end) => {
                    self.scopes.last_mut().expect("a scope is open").branches.push((at, end));
                    self.push(Op::Branch);
                }
                None => self.push(Op::Return),
            },
            "call.uni" => return self.call(),
            _ => {
                let mut args = Vec::new();
                while !matches!(self.tokens.peek().map(|token| token.text), Some(";") | None) {
                    args.push(if opcode == "mov.pred" && !args.is_empty() {
                        self.predicate_operand()?
                    } else {
                        self.operand()?
                    });
                    self.is_next(",");
                    self.is_next("|");
                }
                let instruction = decode(opcode, &args)?;
                self.kernel.code.push(instruction);
            }
        }
        self.expect(";")?;
        let instruction = &mut self.kernel.code[at];
        (instruction.guard, instruction.line) = (guard, line);
        Ok(())
    }

    fn operand(&mut self) -> Result<Arg, Fault> {
        let text = self.next()?;
        Ok(match text {
            "{" => {
                let mut registers = Vec::new();
                while !self.is_next("}") {
                    let name = self.next()?;
                    registers.push(self.value(name)?);
                    self.is_next(",");
                }
                Arg::Vector(registers)
            }
            "[" => {
                let name = self.next()?;
                let base = self.value(name)?;
                let mut offset = 0;
                if self.is_next("+") {
                    let sign = if self.is_next("-") { -1 } else { 1 };
                    offset = sign * number(self.next()?)? as i64;
                }
                self.expect("]")?;
                match self.find(name) {
                    Ok(Name::Parameter(register)) => Arg::Register(register),
                    _ => Arg::Address(base, offset),
                }
            }
            "_" => Arg::Ignored,
            _ => match self.find(text) {
                Ok(Name::Predicate(predicate)) => Arg::Predicate(predicate),
                _ => Arg::Register(self.value(text)?),
            },
        })
    }

    /// A predicate, or a number as a predicate of constant value.
    fn predicate_operand(&mut self) -> Result<Arg, Fault> {
        let name = self.tokens.peek().map_or("", |token| token.text);
        if let Ok(Name::Predicate(predicate)) = self.find(name) {
            self.next()?;
            return Ok(Arg::Predicate(predicate));
        }
        self.is_next("-");
        let value = number(self.next()?)? != 0;
        let predicate = self.predicate();
        self.kernel.constant_predicates.push((predicate, value));
        Ok(Arg::Predicate(predicate))
    }

    /// The register of a name or a number.
    fn value(&mut self, text: &str) -> Result<Register, Fault> {
        if text == "-" {
            let bits = number(self.next()?)?;
            return Ok(self.constant(bits.wrapping_neg()));
        }
        if is_number(text) {
            let bits = number(text)?;
            return Ok(self.constant(bits));
        }
        match self.find(text)? {
            Name::Register(register) | Name::Parameter(register) => Ok(register),
            Name::Address(address) => Ok(self.constant(address)),
            Name::Predicate(_) => Err(Fault(format!("{text} is a predicate"))),
        }
    }

    /// Inlines a function call.
    fn call(&mut self) -> Result<(), Fault> {
        let name = self.next()?;
        self.expect(",")?;
        self.expect("(")?;
        let mut actual = Vec::new();
        while !self.is_next(")") {
            let name = self.next()?;
            actual.push(self.find(name)?);
            self.is_next(",");
        }
        self.expect(";")?;
        let source = self.module.functions.get(name);
        let source = source.ok_or_else(|| Fault(format!("unknown function {name}")))?;
        let text = tokens(&source.text, source.line).into_iter().peekable();
        let caller = std::mem::replace(&mut self.tokens, text);
        self.scopes.push(Scope { end: Some("ret"), ..Scope::default() });
        let formal = self.header()?;
        if formal.len() != actual.len() {
            return Err(Fault(format!("{name} takes {} parameters", formal.len())));
        }
        for ((name, _), register) in formal.into_iter().zip(actual) {
            self.declare(name, register);
        }
        while self.tokens.peek().is_some() {
            self.statement()?;
        }
        let end = self.kernel.code.len();
        self.scopes.last_mut().expect("opened above").labels.insert("ret", end);
        self.push(Op::Nop);
        self.close()?;
        self.tokens = caller;
        Ok(())
    }
}
