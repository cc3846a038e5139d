// The bill's panel: choices, the table, and the options that do the same elsewhere.

"use strict";

const charged = JSON.parse(carried("charged")); // {models, devices, flags, recipes}
const OURS = { model: "meta-llama/Llama-3.1-8B", device: "RTX 4090", context: "32000", users: "8", price: "" };

/** Three digits: 0.0123, 1.23, 12.3, 123, 1,234. */
function digits(value) {
  if (value >= 99.95) return Math.round(value).toLocaleString("en");
  return value >= 9.995 ? value.toFixed(1) : value >= 0.0995 ? value.toFixed(2) : String(Number(value.toPrecision(2)));
}

/** Bytes in decimal units. */
function decimal(value) {
  for (const [unit, least] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
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
    this.parts = Object.fromEntries(["model", "device", "context", "users", "price", "said", "rows", "head"].map((name) => [name, find(name)]));
    const { parts } = this;
    parts.model.append(...Object.keys(charged.models).map((name) => new Option(name)));
    parts.device.append(...Object.keys(charged.devices).map((name) => new Option(name)));
    for (const name of Object.keys(OURS)) {
      parts[name].addEventListener("input", () => {
        this.draw();
        chosen(Object.fromEntries(Object.keys(OURS).map((key) => [key, parts[key].value]).filter(([key, value]) => value !== OURS[key])));
      });
    }
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
    const whole = (value) => Number.isInteger(value) && value >= 1;
    if (!whole(context)) return "Context: expected a whole number of tokens, at least 1.";
    if (!whole(users)) return "Users: expected a whole number of at least 1.";
    if (!(price >= 0)) return "Price: expected an amount per hour, 0 or more.";
    if (model.context !== null && context > model.context) return `${name} was trained for ${model.context.toLocaleString("en")} tokens.`;
    const size = weightBytes(model);
    if (size > device.memory) return `The weights of ${name} take ${decimal(size)} and ${deviceName} has ${decimal(device.memory)}: choose a larger device or a smaller model.`;
    return null;
  }

  draw() {
    const { parts } = this, name = parts.model.value, deviceName = parts.device.value;
    const model = charged.models[name], device = charged.devices[deviceName];
    const [context, users] = [Number(parts.context.value), Number(parts.users.value)];
    const priced = parts.price.value !== "", price = Number(parts.price.value);
    const wrong = this.wrong(name, model, deviceName, device, context, users, price);
    parts.rows.replaceChildren();
    if (wrong) {
      parts.said.textContent = wrong;
      return;
    }
    const weights = weightBytes(model);
    parts.said.textContent = `Weights: ${decimal(weights)} of ${decimal(device.memory)}; ${decimal(device.memory - weights)} are left for caches. `
      + `Reading one user's context takes at least ${duration(prefillSeconds(model, device, context))}.`;
    const heads = ["method", "cache on device", "cache on host", "users fit", "tokens fit", "ms per token", ...(priced ? ["cost per 1M tokens"] : []), "first to run out"];
    parts.head.replaceChildren(row(...heads.map((text) => cell("th", text, "col"))));
    for (const [method, recipe] of Object.entries(charged.recipes)) {
      const line = billLine(recipe, model, device, context, users), count = (n) => (n === null ? "any" : n.toLocaleString("en"));
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
