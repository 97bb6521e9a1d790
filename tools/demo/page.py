"""The page: a form, the sample in the making, and everything made so far. What it does is in `studio.py`."""

import html
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from opensora.registry import PartError
from opensora.utils.errors import UserError
from tools.demo.form import FormValues, form_of, label
from tools.demo.studio import LONGEST_PROMPT, PREPARING, WAITING, Cancelled, Studio, Update

if TYPE_CHECKING:
    import gradio as gr

TITLE = "opensora demo"
KEPT = FormValues._fields.index("height")  # inputs before it stay when another model is chosen
TWO_IN_A_ROW = 200  # pixels of an input: two on a desktop, one on a phone
# on a phone what is made stands under the button, before the settings; videos are seen whole at any width
CSS = """
#work { display: grid; grid-template: "ask result" auto "settings result" 1fr / 2fr 3fr; }
#ask { grid-area: ask; } #settings_of_form { grid-area: settings; } #result { grid-area: result; }
@media (max-width: 767px) { #work { grid-template: "ask" "result" "settings" / 100%; } }
#sample video, #sample_image img { max-height: 66vh; object-fit: contain; }
#gallery .grid-wrap { min-height: 0; max-height: 70vh; }
#gallery:has(.preview) .grid-wrap { min-height: min(420px, 70vh); }
#gallery .grid-container { grid-template-columns: repeat(auto-fill, minmax(min(100%, 240px), 1fr)) !important; }
#gallery .thumbnail-lg { display: flex; flex-direction: column; height: 220px; aspect-ratio: auto; }
#gallery .thumbnail-lg video, #gallery .thumbnail-lg img { flex: 1; min-height: 0; width: 100%; object-fit: contain; }
#gallery .thumbnail-lg .caption-label { position: static; max-width: 100%; }
.bar { margin-top: 6px; background: var(--border-color-primary); border-radius: 4px; }
.bar div { height: 8px; background: var(--color-accent); border-radius: 4px; }
.note { border-left: 4px solid #d97706; padding: 2px 10px; margin-top: 6px; overflow-wrap: anywhere; }
"""


def build_page(studio: Studio) -> "gr.Blocks":
    """The page of a studio; `launch(css=CSS)` serves it."""
    import gradio as gr

    with gr.Blocks(title=TITLE) as page:
        gr.Markdown(f"# {TITLE}")
        several = len(studio.models) > 1
        model = gr.Dropdown([*studio.models], value=studio.default, label="Model", visible=several, elem_id="model")
        about = gr.Markdown(_about(studio, studio.default), elem_id="about")
        with gr.Row(elem_id="work"):
            with gr.Column(elem_id="ask"):
                prompt = gr.Textbox(**_inputs(studio, studio.default)["prompt"])
                examples = gr.Dataset(components=[prompt], **_examples(studio, studio.default))
                with gr.Row():
                    make = gr.Button("Generate", variant="primary", min_width=100, elem_id="generate")
                    cancel = gr.Button("Cancel", variant="stop", min_width=100, elem_id="cancel")
            with gr.Column(elem_id="result"):
                status = gr.HTML(_status("Ready."), elem_id="status")
                notes = gr.HTML(elem_id="notes")
                preview = gr.Image(
                    label="Preview", height=190, visible=False, interactive=False, buttons=[], elem_id="preview"
                )
                video = gr.Video(label="Sample", autoplay=True, loop=True, interactive=False, elem_id="sample")
                sample_image = gr.Image(label="Sample", visible=False, interactive=False, elem_id="sample_image")
            with gr.Column(elem_id="settings_of_form"):
                form = [prompt, *_settings(studio)]
                size_note = gr.HTML(elem_id="size_note")
        gr.Markdown("### Made so far\nClick one to see its settings.")
        gallery = gr.Gallery(
            value=_gallery(studio),
            columns=4,
            height="auto",
            object_fit="contain",
            show_label=False,
            elem_id="gallery",
        )
        with gr.Accordion("Settings of the chosen sample", open=False):
            again = gr.Button("Put these settings into the form")
            settings = gr.Code(language="json", interactive=False, max_lines=24, elem_id="settings")
        chosen = gr.State(None)

        shown = [status, notes, preview, video, sample_image, gallery]
        # the studio lets them take turns, and ends them: a handler that waits in gradio's queue could not be told to
        make.click(_generate(studio), [model, *form], shown, concurrency_limit=None, show_progress="hidden")
        cancel.click(_cancel(studio), None, None, queue=False)
        page.unload(_cancel(studio))
        model.input(_choose_model(studio), [model], [about, examples, *form[KEPT:]], queue=False)
        examples.click(lambda row: row[0], [examples], [prompt], queue=False, show_progress="hidden")
        height, width, num_frames = form[3:6]
        note = {"queue": False, "show_progress": "hidden", "trigger_mode": "always_last"}
        sizes = [each.change for each in (height, width, num_frames, model)]
        gr.on(sizes, _size_note(studio), [model, num_frames, height, width], [size_note], **note)
        gallery.select(_choose(studio), None, [chosen, settings])
        again.click(_again(studio), [chosen, model], [model, about, examples, *form])
        page.load(lambda: _gallery(studio), None, [gallery])  # what was made since the page was built
    page.queue(max_size=2 * WAITING)
    return page


def _settings(studio: Studio) -> list[Any]:
    """The inputs after the prompt, in the order of `FormValues`."""
    import gradio as gr

    inputs = _inputs(studio, studio.default)
    negative = gr.Textbox(**inputs["negative_prompt"])
    # image_mode=None: the file as it is; another mode would be compressed again
    image = gr.Image(**inputs["image"], type="filepath", image_mode=None, height=160)
    with gr.Row():
        height, width = gr.Slider(**inputs["height"]), gr.Slider(**inputs["width"])
    with gr.Row():
        num_frames, steps = gr.Slider(**inputs["num_frames"]), gr.Slider(**inputs["steps"])
    with gr.Row():
        guidance, seed = gr.Slider(**inputs["guidance"]), gr.Number(**inputs["seed"], precision=0)
    return [negative, image, height, width, num_frames, steps, guidance, seed]


def _inputs(studio: Studio, name: str, form: FormValues | None = None) -> dict[str, dict[str, Any]]:
    """What the inputs of the page hold for a model, with the values of `form` (None: its first form).

    A slider goes as far as the model's offer, or as a sample's settings do: it refuses what is beyond it.
    """
    offer, first = studio.models[name].offer, studio.first_form(name)
    values = (form or first)._asdict()
    inputs: dict[str, dict[str, Any]] = {field: {"value": value, "elem_id": field} for field, value in values.items()}
    inputs["prompt"] |= {"label": "Prompt", "lines": 3, "max_length": LONGEST_PROMPT}
    inputs["negative_prompt"] |= {
        "label": "Negative prompt",
        "info": "what to steer away from; needs a guidance other than 1",
        "max_length": LONGEST_PROMPT,
    }
    inputs["image"] |= {"label": "First frame (optional)"}
    labels = {"height": "Height", "width": "Width", "num_frames": "Frames", "steps": "Steps", "guidance": "Guidance"}
    for field, text in labels.items():
        least, most, step = offer.ranges[field]
        known = [value for value in (values[field], getattr(first, field)) if value is not None]
        ends = {"minimum": min(least, *known), "maximum": max(most, *known)}
        visible = ends["minimum"] < ends["maximum"]
        inputs[field] |= {"label": text, **ends, "step": step, "visible": visible, "min_width": TWO_IN_A_ROW}
    inputs["num_frames"] |= {"info": "1 makes an image"} if offer.ranges["num_frames"].least == 1 else {}
    inputs["guidance"] |= {"info": "1 switches it off"}
    inputs["seed"] |= {"label": "Seed", "info": "empty: another one each time", "min_width": TWO_IN_A_ROW}
    return inputs


def _examples(studio: Studio, name: str) -> dict[str, Any]:
    examples = studio.models[name].examples
    return {"samples": [[each] for each in examples], "label": "Examples", "visible": bool(examples)}


def _choose_model(studio: Studio) -> Any:
    """The handler of the menu: the settings of the model that was chosen. Prompts and image stay, which the visitor may have given."""
    import gradio as gr

    def choose_model(name: str) -> list[Any]:
        inputs = [gr.update(**each) for each in [*_inputs(studio, name).values()][KEPT:]]
        return [_about(studio, name), gr.update(**_examples(studio, name)), *inputs]

    return choose_model


def _size_note(studio: Studio) -> Any:
    return lambda *size: _notes([studio.size_note(*size)])


def _generate(studio: Studio) -> Any:
    """The handler of the button: yields values of status, notes, preview, video, image and gallery."""
    import gradio as gr

    def generate(request: gr.Request, name: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        none = gr.update(value=None, visible=False)  # of the preview
        yield _status(PREPARING), "", none, gr.skip(), gr.skip(), gr.skip()
        try:
            for update in studio.make(FormValues(*values), str(request.session_hash), name):
                yield _shown(studio, update)
        except Cancelled:
            yield _status("Cancelled."), "", none, gr.skip(), gr.skip(), gr.skip()
        except (UserError, PartError) as error:
            yield _status(str(error), bad=True), "", none, gr.skip(), gr.skip(), gr.skip()

    return generate


def _shown(studio: Studio, update: Update) -> tuple[Any, ...]:
    """What the outputs become: nothing new where nothing changed."""
    import gradio as gr

    status, notes = _status(update.status, update.done), _notes(update.notes)
    preview = gr.skip() if update.preview is None else gr.update(value=update.preview, visible=True)
    if update.sample is None:
        return status, notes, preview, gr.skip(), gr.skip(), gr.skip()
    path = str(update.sample.path)
    still = update.sample.path.suffix in (".png", ".gif")  # what a browser shows as an image
    video = gr.update(value=None if still else path, visible=not still)
    sample_image = gr.update(value=path if still else None, visible=still)
    return status, notes, gr.update(value=None, visible=False), video, sample_image, _gallery(studio)


def _cancel(studio: Studio) -> Any:
    import gradio as gr

    def cancel(request: gr.Request) -> None:
        studio.cancel(str(request.session_hash))

    return cancel


def _choose(studio: Studio) -> Any:
    import gradio as gr

    def choose(event: gr.SelectData) -> tuple[dict[str, Any] | None, str]:
        wanted = event.value["caption"]  # its place in the gallery may be another's by now
        for sample in studio.samples():
            if label(sample) == wanted:
                return sample.record, json.dumps(sample.record, indent=2, ensure_ascii=False)
        return None, "This sample is no longer in the folder."

    return choose


def _again(studio: Studio) -> Any:
    """The handler of the button below: model and form as they were for the chosen sample."""
    import gradio as gr

    def again(record: dict[str, Any] | None, name: str) -> list[Any]:
        if record is None:
            return [gr.skip()] * (3 + len(FormValues._fields))
        name, form = studio.model_of(record, name), form_of(record)
        try:
            form = form._replace(image=None if form.image is None else studio.keep_image(form.image))
        except UserError as error:
            gr.Warning(str(error))
            form = form._replace(image=None)
        inputs = _inputs(studio, name, form)
        for field in ("steps", "guidance"):
            if getattr(form, field) is None:  # nobody knows
                del inputs[field]["value"]
        examples = gr.update(**_examples(studio, name))
        return [name, _about(studio, name), examples, *(gr.update(**each) for each in inputs.values())]

    return again


def _gallery(studio: Studio) -> list[tuple[str, str]]:
    return [(str(sample.path), label(sample)) for sample in studio.samples()]


def _about(studio: Studio, name: str) -> str:
    model = studio.models[name]
    weights = model.cfg.model.get("from_pretrained") or "random weights"
    return f"`{model.cfg.model['type']}`, `{weights}`, on `{model.device}`. {model.offer.about}"


def _notes(notes: Iterable[str]) -> str:
    return "".join(f'<div class="note">{html.escape(note)}</div>' for note in notes if note)


def _status(text: str, done: float | None = None, *, bad: bool = False) -> str:
    """A line with a bar, or a message about what went wrong."""
    percent = None if done is None else f"{100 * done:.0f}"
    bar = f'<div class="bar" role="progressbar" aria-valuenow="{percent}"><div style="width: {percent}%"></div></div>'
    style = "color: #b00020; font-weight: 600; overflow-wrap: anywhere" if bad else ""
    return f'<div role="status" style="{style}">{html.escape(text)}</div>{"" if done is None else bar}'
