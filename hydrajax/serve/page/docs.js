// The page at /docs: the routes of openapi.json, with fields, types and an example of each.
const api = await (await fetch("openapi.json")).json();
const schemas = api.components.schemas;

function add(parent, tag, text = "", fields = {}) {
  const node = Object.assign(document.createElement(tag), { textContent: text }, fields);
  parent.append(node);
  return node;
}

const resolved = (schema) => (schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema);

function type(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return [...new Set(several.map(type))].filter((one) => one !== "null").join(" or ");
  if (schema.type === "array") return `list of ${type(schema.items ?? {})}`;
  const limits = [["≥", "minimum"], ["≤", "maximum"]].filter(([, name]) => name in schema);
  return [schema.type ?? "any, ignored", ...limits.map(([sign, name]) => `${sign} ${schema[name]}`)].join(" ");
}

function fields(parent, schema) {
  const table = add(parent, "table");
  for (const [name, field] of Object.entries(schema.properties ?? {}).filter(([, field]) => type(field))) {
    const row = add(table, "tr");
    add(row, "td", name + (schema.required?.includes(name) ? " (required)" : ""));
    add(row, "td", type(field));
  }
}

const routes = document.getElementById("routes");
for (const [path, methods] of Object.entries(api.paths))
  for (const [method, operation] of Object.entries(methods)) {
    const section = add(routes, "details");
    add(section, "summary", `${method.toUpperCase()} ${path}: ${operation.summary}`);
    const body = operation.requestBody?.content["application/json"];
    if (body) {
      fields(section, resolved(body.schema));
      const example = JSON.stringify(body.example).replaceAll("'", "'\\''");
      add(section, "pre", `curl ${location.origin}${path} -H 'content-type: application/json' \\\n  -d '${example}'`);
    } else add(section, "pre", `curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${location.origin}${path}`);
    const answer = operation.responses[200].content["application/json"];
    if (answer) fields(section, resolved(answer.schema));
  }
for (const [name, schema] of Object.entries(schemas)) {
  const section = add(routes, "details");
  add(section, "summary", name);
  fields(section, schema);
}
