// The chat page. It uses the same API as any other client. For each answer it shows the accepted draft tokens, tokens per
// step and tokens/s, and the time that the same tokens would take without a draft.

const at = (id) => document.getElementById(id);
const state = { models: new Map(), conversation: [], running: null };

// --- models ----------------------------------------------------------------------------------------------------------

function headers() {
  const key = at("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function errorOf(response) {
  const message = await response.json().then((body) => body.error.message).catch(() => response.statusText);
  return new Error(message || `status ${response.status}`);
}

function titleOf(id, about) {
  if (!about) return id;
  return about.draft === "none" ? "no draft" : `${about.draft}, ${about.tree}`;
}

async function findModels() {
  const response = await fetch("v1/models", { headers: headers() });
  at("key_label").hidden = response.status !== 401 && !at("key").value;
  if (!response.ok) throw await errorOf(response);
  const { data } = await response.json();
  state.models = new Map(data.map((model) => [model.id, model.hydrajax ?? {}]));
  at("model").replaceChildren(
    ...data.map(({ id, hydrajax }) => new Option(titleOf(id, hydrajax), id)),
  );
  const hasTemplate = data[0]?.hydrajax?.conversations ?? true;
  at("form").querySelector("[value=chat]").disabled = !hasTemplate;
  if (!hasTemplate) at("form").value = "text";
  at("error").textContent = "";
}

// --- answers ---------------------------------------------------------------------------------------------------------

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const content = line.replace(/^data: /, "");
      if (content === "[DONE]") return;
      yield JSON.parse(content);
    }
  }
}

function requestBody() {
  const sampled = at("rule").value === "exact";
  const seed = at("seed").value;
  return {
    model: at("model").value,
    max_tokens: Number(at("max_tokens").value),
    temperature: sampled ? Number(at("temperature").value) : 0,
    ...(sampled ? { top_p: Number(at("top_p").value), ...(seed === "" ? {} : { seed: Number(seed) }) } : {}),
    stream: true,
    stream_options: { include_usage: true, include_drafts: true },
  };
}

function message(role, code, of = "") {
  const found = at("message").content.cloneNode(true).firstElementChild;
  found.classList.add(role);
  found.querySelector("h2").textContent = { user: "You", assistant: "Model", text: "Text" }[role] + of;
  found.querySelector(".text").classList.toggle("code", code);
  at("messages").append(found);
  at("messages").scrollTop = at("messages").scrollHeight;
  return found;
}

// Tokens do not join to a text that is held back for a stop string. It is then shown without colours.
function show(place, text, tokens) {
  if (tokens.map((token) => token.text).join("") !== text) {
    place.append(text);
    return;
  }
  for (const token of tokens) {
    const span = document.createElement("span");
    span.className = token.drafted ? "drafted" : "own";
    span.textContent = token.text;
    place.append(span);
  }
}

// The reasoning has an element of its own before the content.
function think(place, text) {
  if (!place.querySelector(".thought")) place.append(Object.assign(document.createElement("div"), { className: "thought" }));
  place.querySelector(".thought").append(text);
}

function figures(place, run) {
  if (!run.steps) return;
  const bold = (text) => Object.assign(document.createElement("b"), { textContent: text });
  const seconds = ((run.last ?? performance.now()) - run.first) / 1000;
  const rate = run.tokens > run.firstTokens && seconds > 0 ? (run.tokens - run.firstTokens) / seconds : NaN;
  const parts = [bold(`${(run.tokens / run.steps).toFixed(2)} tokens per step`), `${run.tokens} tokens in ${run.steps} steps`];
  if (Number.isFinite(rate)) parts.push(bold(`${rate.toFixed(0)} tokens/s`), `${seconds.toFixed(2)} s`);
  const plain = run.plainStep * run.tokens;
  if (plain) parts.push(`without a draft ${plain.toFixed(2)} s at ${(1000 * run.plainStep).toFixed(2)} ms per token`);
  parts.push(`first token after ${((run.first - run.began) / 1000).toFixed(2)} s`);
  if (run.seed !== undefined && run.seed !== null) parts.push(`seed ${run.seed}`);
  place.replaceChildren(...parts.flatMap((part, number) => (number ? [" · ", part] : [part])));
}

async function answer(prompt) {
  const chat = at("form").value === "chat";
  const body = requestBody();
  const conversation = state.conversation; // the user may start a new one during the answer
  if (chat) body.messages = [...conversation, { role: "user", content: prompt }];
  else body.prompt = prompt;
  const abort = new AbortController();
  state.running = abort;
  const run = { began: performance.now(), tokens: 0, steps: 0, plainStep: state.models.get(body.model)?.plain_step_seconds };
  let place, line, answered = "";
  try {
    const response = await fetch(chat ? "v1/chat/completions" : "v1/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: abort.signal,
    });
    if (!response.ok) throw await errorOf(response);
    at("prompt").value = "";
    if (chat) message("user", false).querySelector(".text").textContent = prompt;
    const drafted = at("model").selectedOptions[0].text;
    const shown = message(chat ? "assistant" : "text", !chat, ` · ${drafted}`);
    [place, line] = [shown.querySelector(".text"), shown.querySelector(".figures")];
    if (!chat) place.append(prompt);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) run.seed = event.hydrajax?.seeds?.[0];
      const choice = event.choices[0];
      const text = (chat ? choice?.delta?.content : choice?.text) ?? "";
      const tokens = event.hydrajax?.tokens ?? [];
      const thought = choice?.delta?.reasoning ?? "";
      if (!text && !thought && !tokens.length) continue;
      run.last = performance.now();
      run.tokens += tokens.length;
      run.steps += tokens.filter((token) => !token.drafted).length;
      if (run.first === undefined) [run.first, run.firstTokens] = [run.last, run.tokens];
      const low = at("messages").scrollHeight - at("messages").scrollTop - at("messages").clientHeight < 80;
      if (thought) think(place, thought);
      show(place, text, tokens);
      answered += text;
      figures(line, run);
      if (low) at("messages").scrollTop = at("messages").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") at("error").textContent = error.message;
  } finally {
    state.running = null;
    if (line && run.first !== undefined) figures(line, run);
    if (chat && answered) {
      conversation.push({ role: "user", content: prompt }, { role: "assistant", content: answered });
    }
  }
}

// --- controls ----------------------------------------------------------------------------------------------------------

function busy(is) {
  at("send").disabled = is;
  at("stop").hidden = !is;
}

at("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (state.running || !at("settings").reportValidity()) return;
  at("error").textContent = "";
  busy(true);
  if (!state.models.size) await findModels().catch((error) => (at("error").textContent = error.message));
  if (state.models.size) await answer(at("prompt").value);
  busy(false);
  at("prompt").focus();
});

at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});

at("stop").addEventListener("click", () => state.running?.abort());

at("clear").addEventListener("click", () => {
  state.running?.abort();
  state.conversation = [];
  at("messages").replaceChildren();
  at("error").textContent = "";
});

// Hidden inputs are disabled, because the browser would refuse the form for an error that the user cannot see.
function shownForRule() {
  for (const label of document.querySelectorAll(".sampled")) {
    label.hidden = label.querySelector("input").disabled = at("rule").value === "greedy";
  }
}

at("rule").addEventListener("change", shownForRule);
at("colours").addEventListener("change", () => document.body.classList.toggle("plain", !at("colours").checked));
at("key").addEventListener("change", () => findModels().catch((error) => (at("error").textContent = error.message)));
at("settings").addEventListener("submit", (event) => event.preventDefault());

shownForRule();
findModels().catch((error) => (at("error").textContent = error.message));
