// A page of recorded steps: choose a request, look at its answer as it came.

import { Answer } from "./answer.js";

const recorded = JSON.parse(document.querySelector("#recorded").textContent);
const select = document.querySelector("#requests");
const card = document.querySelector("#answer");
const template = document.querySelector("#with-tree");

function show() {
  const { engine, steps } = recorded[select.selectedIndex];
  document.querySelector("#engine").textContent = engine;
  card.replaceChildren(template.content.cloneNode(true));
  card.querySelector("h2").textContent = `From position ${steps[0].position + 1}`;
  const answer = new Answer(card);
  for (const step of steps) answer.add(step);
  answer.rest();
}

for (const { id } of recorded) select.append(new Option(id));
document.querySelector("#pick").hidden = recorded.length < 2;
select.addEventListener("change", show);
show();
