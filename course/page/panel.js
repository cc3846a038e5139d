// The bill's panel: choices, the table, and the options that do the same elsewhere.

"use strict";

const charged = JSON.parse(carried("charged")); // what kvlab computed (bills.py)
const OURS = { ...told.bill, budget: "20", price: "" }; // the bill of the course (build.py)

/** Bytes of weights that a step of `rows` rows reads: of experts those that some row takes. */
function stepWeights({ read, experts: [size, all, taken] }, rows) {
  return read + size * (1 - (1 - taken / all) ** rows);
}

/** Seconds that reading one user's context takes at least. */
const prefillSeconds = (model, device, context) =>
  Math.max(model.prefill[context] / device.flops, stepWeights(model, context) / device.bandwidth);

/** The row of a method, of one user: [bytes on the device, on the host, moved, read, operations], or why it is refused. */
function userRow(method, model, context, budget) {
  const rows = model.rows[context][method];
  return rows.length > 1 ? rows[charged.budgets.indexOf(budget)] : rows[0];
}

/** One line of the bill: bytes of all users, users that fit (null: any) and the longest context of the list that fits,
 * the least seconds per token of the users that fit, and what runs out first; or {refused}. */
function billLine(method, model, device, context, budget, users) {
  const found = userRow(method, model, context, budget);
  if (typeof found === "string") return { refused: found };
  let [onDevice, host, moved, read, operations] = found;
  const left = device.memory - model.weights, fit = onDevice ? Math.floor(left / onDevice) : null;
  if (charged.pages.includes(method) && users * host <= left) [onDevice, host, moved] = [host, 0, 0];
  const fits = Object.keys(model.rows).map(Number).filter((tokens) => users * userRow(method, model, tokens, budget)[0] <= left);
  const served = fit === null ? users : Math.min(users, fit);
  const line = { device: users * onDevice, host: users * host, moved: users * moved, users: fit, served,
    tokens: Math.max(0, ...fits), seconds: null, first: "memory" };
  if (!served) return line;
  const least = {
    bandwidth: (stepWeights(model, served) + served * read) / device.bandwidth,
    link: (served * moved) / device.link, "FLOP/s": served * operations / device.flops,
  };
  const bound = Object.keys(least).reduce((a, b) => (least[b] > least[a] ? b : a));
  return { ...line, seconds: least[bound], first: served === users ? bound : "memory" };
}

/** Three digits: 0.0123, 1.23, 12.3, 123, 1,234; 1.2e+7 from there on. */
function digits(value) {
  if (value >= 1e7) return value.toPrecision(2);
  if (value >= 99.95) return Math.round(value).toLocaleString("en");
  return value >= 9.995 ? value.toFixed(1) : value >= 0.0995 ? value.toFixed(2) : String(Number(value.toPrecision(2)));
}

/** Bytes in decimal units. */
function decimal(value) {
  for (const [unit, least] of [["EB", 1e18], ["PB", 1e15], ["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= 0.9995 * least) return `${digits(value / least)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

const duration = (seconds) => (seconds >= 1 ? `${digits(seconds)} s` : `${digits(seconds * 1e3)} ms`);

function cell(kind, text, scope) {
  const element = document.createElement(kind);
  element.textContent = text;
  if (scope) element.scope = scope;
  return element;
}

function row(...cells) {
  const element = document.createElement("tr");
  element.append(...cells);
  return element;
}

/** given: choices that are not as in OURS; chosen(given): the reader has made others. */
class Panel {
  constructor(given, chosen) {
    const find = (name) => document.getElementById(`bill-${name}`);
    this.parts = Object.fromEntries(["model", "device", "context", "users", "budget", "price", "said", "rows", "head"].map((name) => [name, find(name)]));
    const { parts } = this;
    parts.model.append(...Object.keys(charged.models).map((name) => new Option(name)));
    parts.device.append(...Object.keys(charged.devices).map((name) => new Option(name)));
    parts.context.append(...charged.contexts.map((tokens) => new Option(tokens.toLocaleString("en"), tokens)));
    parts.budget.append(...charged.budgets.map((percent) => new Option(percent)));
    for (const name of Object.keys(OURS)) {
      parts[name].addEventListener("input", () => {
        this.draw();
        chosen(Object.fromEntries(Object.keys(OURS).map((key) => [key, parts[key].value]).filter(([key, value]) => value !== OURS[key])));
      });
    }
    find("notes").append(...charged.notes.map((note) => cell("li", note)));
    this.flags(find("flags"));
    this.show(given);
  }

  /** Make these choices; what nobody knows is as in OURS. */
  show(given) {
    for (const [name, ours] of Object.entries(OURS)) {
      const part = this.parts[name], value = given[name] ?? ours;
      part.value = value;
      if (part.value !== value) part.value = ours;
    }
    this.draw();
  }

  /** What is wrong with the choices, or null. */
  wrong(name, model, deviceName, device, context, users, price) {
    const { most } = charged, upTo = (limit) => limit.toLocaleString("en");
    if (!(Number.isInteger(users) && users >= 1 && users <= most.users)) return `Users: expected a whole number from 1 to ${upTo(most.users)}.`;
    if (!(price >= 0 && price <= most.price)) return `Price: expected an amount per hour from 0 to ${upTo(most.price)}.`;
    if (!(context in model.rows)) return `${name} was trained for fewer tokens than ${upTo(context)}.`;
    if (model.weights > device.memory) return `The weights of ${name} take ${decimal(model.weights)} and ${deviceName} has ${decimal(device.memory)}: choose a larger device or a smaller model.`;
    return null;
  }

  draw() {
    const { parts } = this, name = parts.model.value, deviceName = parts.device.value;
    const model = charged.models[name], device = charged.devices[deviceName];
    const [context, users] = [Number(parts.context.value), Number(parts.users.value)];
    const priced = parts.price.value !== "", price = Number(parts.price.value), budget = Number(parts.budget.value);
    const wrong = this.wrong(name, model, deviceName, device, context, users, price);
    for (const part of [parts.rows, parts.head]) part.replaceChildren();
    if (wrong) {
      parts.said.textContent = wrong;
      return;
    }
    const { weights } = model;
    const prefill = prefillSeconds(model, device, context), perMillion = (price * prefill) / 3600 * 1e6 / context;
    parts.said.textContent = `Weights: ${decimal(weights)} of ${decimal(device.memory)}; ${decimal(device.memory - weights)} are left for caches. `
      + `Reading one user's context takes at least ${duration(prefill)}${priced ? `, ${digits(perMillion)} per million tokens` : ""}.`;
    const heads = ["method", "cache on device", "cache on host", "users fit", "tokens fit", "ms per token", ...(priced ? ["cost per 1M tokens"] : []), "first to run out"];
    parts.head.replaceChildren(row(...heads.map((text) => cell("th", text, "col"))));
    for (const [name, rows] of Object.entries(model.rows[context])) {
      const line = billLine(name, model, device, context, budget, users);
      const count = (n) => (n === null ? "any" : n.toLocaleString("en")), method = rows.length > 1 ? `${name}, ${budget} %` : name;
      if (line.refused) {
        const reason = cell("td", `not on this model: ${line.refused}`);
        reason.colSpan = heads.length - 1;
        parts.rows.append(row(cell("th", method, "row"), reason));
        continue;
      }
      const cost = line.seconds === null ? "–" : digits(((price * line.seconds) / 3600) * 1e6 / line.served);
      const cells = [decimal(line.device), line.host ? decimal(line.host) : "–", count(line.users), count(line.tokens),
        line.seconds === null ? "–" : digits(line.seconds * 1e3), ...(priced ? [cost] : []), line.first];
      parts.rows.append(row(cell("th", method, "row"), ...cells.map((text) => cell("td", text))));
    }
  }

  /** The options that do the same in the engines that people use. */
  flags(table) {
    const { engines, techniques, read } = charged.flags, names = Object.keys(engines);
    table.caption.textContent = `The same elsewhere: ${names.map((name) => `${name} ${engines[name].version}`).join(", ")}; read on ${read}.`;
    table.tHead.append(row(cell("th", "technique", "col"), ...names.map((name) => cell("th", name, "col"))));
    for (const { name, methods, options } of techniques) {
      const found = names.map((engine) => {
        const element = cell("td", ""), option = options[engine];
        if (!option) element.textContent = "not there";
        else element.append(cell("code", option.option), option.note ? `; ${option.note}` : "");
        return element;
      });
      table.tBodies[0].append(row(cell("th", `${name} (${methods.join(", ")})`, "row"), ...found));
    }
  }
}
